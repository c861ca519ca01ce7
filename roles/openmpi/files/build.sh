# Patches, compiles and packs OpenMPI in the working directory. TARBALL, PATCHES, CONFIGURE and GXX come from this role, MPI
# from role stack.
command -v "gcc-$GXX" "g++-$GXX" || {
    echo "error: the lock wants g++-$GXX, which this builder does not have: set build_tools_gxx: \"$GXX\"" >&2
    exit 1
}
rm -rf source made packed
mkdir -p source packed/mpi
tar --extract --file "$TARBALL" --directory source --strip-components 1
cd source
for patch in $PATCHES; do
    echo "patch $patch"
    patch --strip=1 --fuzz=0 --forward <"../$patch"
done
# Its settings lie outside of what is packed: they are the node's own. What only this builder may have, as where the queue
# has brought libpmix-dev, would be missing on others. CONFIGURE is a list of words.
# shellcheck disable=SC2086
./configure --prefix="$MPI" --sysconfdir=/etc/farandole/openmpi CC="gcc-$GXX" CXX="g++-$GXX" \
    --with-pmix=internal --with-libevent=internal --with-hwloc=internal $CONFIGURE
# dash, if the release has it as its sh, runs the thousands of calls of libtool faster than the bash that configure chooses.
make --jobs="$(nproc)" SHELL=/bin/sh
make --jobs="$(nproc)" SHELL=/bin/sh install DESTDIR="$PWD/../made"
cd ..
mv "made$MPI" packed/mpi
find packed '(' -name '*.la' -o -name '*.a' ')' -delete
find packed/mpi/*/bin packed/mpi/*/lib -type f -exec sh -c 'file=$1
    if [ "$(head -c 4 "$file" | tail -c 3)" = ELF ]; then strip --strip-unneeded "$file"; fi' - {} ';'
tar --create --use-compress-program='zstd -T0 -10' --file openmpi.tar.zst.part --sort=name --mtime='2020-01-01 UTC' \
    --owner=0 --group=0 --numeric-owner --directory packed "mpi/${MPI##*/}"
mv openmpi.tar.zst.part openmpi.tar.zst
sha256sum openmpi.tar.zst >openmpi.tar.zst.sha256
rm -rf source made packed
