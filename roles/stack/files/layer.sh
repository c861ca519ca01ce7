# Makes the virtual environment of a stack that adds packages to another one, BASE. STACK, REQUIREMENTS (one pinned and hashed
# wheel per line), ARCHIVES (of wheels that were built), REPLACE and NAMES come from the role. Root runs nothing of the base, which
# another builder may have made.
venv=$STACK/venv
from=${STACK%/*}/$BASE/venv
sh -euc "$REPLACE" - "$STACK"
mkdir -p "$STACK"
ln --symbolic "../$BASE" "$STACK/base"
printf '%s\n' "$REQUIREMENTS" >requirements.txt
rm -rf wheel
for archive in $ARCHIVES; do
    tar --extract --zstd --file "$archive"
done
for wheel in wheel/*.whl; do
    [ ! -e "$wheel" ] || echo "./$wheel --hash=sha256:$(sha256sum "$wheel" | cut -d ' ' -f 1)" >>requirements.txt
done
python3 -I -c "$NAMES" wheels/*.whl wheel/*.whl
python3 -m venv "$venv"
# In one go: a second pip would already run what the packages put there.
packages=$(echo "$venv"/lib/python3.*/site-packages)
PIP_CONFIG_FILE=/dev/null "$venv/bin/pip" install --disable-pip-version-check --no-cache-dir --no-compile --no-deps \
    --no-index --find-links wheels --require-hashes --requirement requirements.txt
# The base has them.
rm -rf "$packages"/pip "$packages"/pip-* "$packages"/setuptools "$packages"/setuptools-* "$packages"/pkg_resources \
    "$packages"/_distutils_hack "$packages"/distutils-precedence.pth "$venv"/bin/pip*
# Some packages contain files that are no Python 3, which say nothing about the rest; what was asked for is loaded later.
python3 -I -m compileall -qq -f -j 0 -s "$packages" --invalidation-mode unchecked-hash "$packages" || true
# addsitedir heeds the base's own .pth files, which a line with a path does not.
printf 'import site; site.addsitedir("%s")\n' "$from/${packages#"$venv/"}" >"$packages/base.pth"
# The base's programs, for this environment.
real=$(realpath "${STACK%/*}")/$BASE/venv/bin
for program in "$real"/*; do
    # Who made the base may have put links there, to what only root can read here.
    [ "$(realpath "$program")" = "$program" ] && [ -f "$program" ] || continue
    [ ! -e "$venv/bin/${program##*/}" ] || continue
    [ "$(head -c 2 "$program")" = '#!' ] || continue
    sed "1s|^#!$from/bin/|#!$venv/bin/|" "$program" >"$venv/bin/${program##*/}"
    chmod 755 "$venv/bin/${program##*/}"
done
