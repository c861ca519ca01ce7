# Patches and compiles Horovod into a wheel. SOURCE, PATCHES, GXX and the HOROVOD_ settings come from this role; VENV and MPI
# from role stack.
rm -rf source wheel
mkdir source wheel
tar --extract --file "$SOURCE" --directory source --strip-components 1
cd source
for patch in $PATCHES; do
    echo "patch $patch"
    patch --strip=1 --fuzz=0 --forward <"../$patch"
done
# RelWithDebInfo is -O3 here too, but debugging symbols are nine tenths of the libraries and take a quarter of the time.
sed --in-place "s/'RelWithDebInfo'/'Release'/" setup.py
cd ..
export PATH="$VENV/bin:$MPI/bin:$PATH:/usr/local/cuda/bin" CC="gcc-$GXX" CXX="g++-$GXX"
export MAKEFLAGS="-j$(nproc)" CMAKE_BUILD_PARALLEL_LEVEL="$(nproc)" HOROVOD_CMAKE="$(command -v cmake)"
PIP_CONFIG_FILE=/dev/null "$VENV/bin/pip" wheel --disable-pip-version-check --no-cache-dir --no-index --no-deps \
    --no-build-isolation --verbose --wheel-dir wheel ./source
tar --create --use-compress-program='zstd -T0 -10' --file horovod.tar.zst.part --sort=name --owner=0 --group=0 \
    --numeric-owner wheel
mv horovod.tar.zst.part horovod.tar.zst
sha256sum horovod.tar.zst >horovod.tar.zst.sha256
rm -rf source
