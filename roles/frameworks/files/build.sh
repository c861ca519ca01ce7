# Makes the stack's virtual environment. REQUIREMENTS (one pinned and hashed wheel per line) comes from this role; VENV,
# REPLACE and NAMES from role stack.
# An environment that was interrupted is made anew: nothing tells how far pip came.
sh -euc "$REPLACE" - "$VENV"
printf '%s\n' "$REQUIREMENTS" >requirements.txt
python3 -I -c "$NAMES" wheels/*.whl
python3 -m venv "$VENV"
PIP_CONFIG_FILE=/dev/null "$VENV/bin/pip" install --disable-pip-version-check --no-cache-dir --no-compile --no-deps \
    --no-index --find-links wheels --require-hashes --requirement requirements.txt
# What the packages test themselves with, and what only a linker wants.
packages=$(echo "$VENV"/lib/python3.*/site-packages)
find "$packages" -type d '(' -name tests -o -path "$packages/torch/test" ')' -prune -exec rm -rf '{}' +
find "$packages" -name '*.a' -delete
# Compiled here, as the job user cannot write there, and while a core has nothing else to do; valid by content, as the archive has
# no times of its own, and the same in each stack, without its path. Some packages contain files that are no Python 3.
python3 -I -m compileall -qq -f -j 0 -s "$packages" --invalidation-mode unchecked-hash "$packages" || true
