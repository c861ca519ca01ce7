# Installs the packed wheel into the stack's environment and loads nothing yet; ARCHIVE, STACK and MPI come from the role.
stack=/opt/farandole/stacks/$STACK
# From here on it is not what was listed, until it is packed again.
rm -f "$stack/manifest.json" "$stack/contents"
rm -rf wheel
tar --extract --zstd --file "$ARCHIVE"
PIP_CONFIG_FILE=/dev/null "$stack/venv/bin/pip" install --disable-pip-version-check --no-cache-dir --no-compile --no-deps \
    --no-index --force-reinstall wheel/horovod-*.whl
ln --symbolic --force --no-dereference "../../mpi/$MPI" "$stack/mpi"
