# Installs the packed wheel into the stack's environment without loading it. ARCHIVE comes from this role, VENV from role
# stack.
rm -rf wheel
tar --extract --zstd --file "$ARCHIVE"
PIP_CONFIG_FILE=/dev/null "$VENV/bin/pip" install --disable-pip-version-check --no-cache-dir --no-compile --no-deps \
    --no-index --force-reinstall wheel/horovod-*.whl
packages=$(echo "$VENV"/lib/python3.*/site-packages)
python3 -I -m compileall -qq -f -s "$packages" --invalidation-mode unchecked-hash "$packages/horovod"
