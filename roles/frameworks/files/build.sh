# Makes the stack's virtual environment; STACK and REQUIREMENTS (one pinned and hashed wheel a line) come from the role.
stack=/opt/farandole/stacks/$STACK
venv=$stack/venv
# An environment that was interrupted is made anew: nothing tells how far pip came.
mkdir -p /opt/farandole/removing
[ ! -e "$stack" ] || mv "$stack" "/opt/farandole/removing/$STACK.$$"
rm -rf /opt/farandole/removing
mkdir -p "$stack"
printf '%s\n' "$REQUIREMENTS" >requirements.txt
python3 -m venv "$venv"
PIP_CONFIG_FILE=/dev/null "$venv/bin/pip" install --disable-pip-version-check --no-cache-dir --no-compile --no-deps \
    --no-index --find-links wheels --require-hashes --requirement requirements.txt
# What the packages test themselves with, and what only a linker wants.
packages=$(echo "$venv"/lib/python3.*/site-packages)
find "$packages" -type d '(' -name tests -o -path "$packages/torch/test" ')' -prune -exec rm -rf '{}' +
find "$packages" -name '*.a' -delete
