# Makes a wheel of SOURCE with TOOLS (one pinned and hashed wheel per line), and checks that it needs what its sources said,
# REQUIRES. VENV and MPI are the stack's: extensions of PyTorch import it, others call mpicc. The package decides what runs
# here: not as root, without the network, and with one folder to write to.
here=$PWD
cd "$CACHE_DIRECTORY"
find . -mindepth 1 -delete
export HOME="$PWD" PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INDEX=1 PIP_NO_CACHE_DIR=1
printf '%s\n' "$TOOLS" >tools.txt
python3 -m venv venv
venv/bin/pip install --no-deps --find-links "$here" --require-hashes --requirement tools.txt
stack=$(echo "$VENV"/lib/python3.*/site-packages)
printf 'import site; site.addsitedir("%s")\n' "$stack" >"$(echo venv/lib/python3.*/site-packages)/stack.pth"
PATH=$PWD/venv/bin:$MPI/bin:$PATH venv/bin/pip wheel --no-deps --no-build-isolation --check-build-dependencies \
    --wheel-dir wheel "$here/$SOURCE"
venv/bin/python - "$REQUIRES" wheel/*.whl <<'END'
import json, sys
from importlib.metadata import PathDistribution
from zipfile import Path, ZipFile
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

def needed(requirements):
    found = map(Requirement, requirements)
    return {(canonicalize_name(one.name), str(one.specifier)) for one in found if not one.marker or one.marker.evaluate({"extra": ""})}

said, wheel = sys.argv[1:]
folder = next(one for one in Path(ZipFile(wheel)).iterdir() if one.name.endswith(".dist-info"))
for name, versions in sorted(needed(PathDistribution(folder).requires or ()) - needed(json.loads(said))):
    sys.exit(f"error: it needs {name}{versions}, which its sources do not say: add that to stack_packages")
END
