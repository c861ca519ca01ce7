# Patches, compiles and packs OpenMPI in the working directory; TARBALL, PATCHES, KEY, CONFIGURE and GXX come from the role.
command -v "gcc-$GXX" "g++-$GXX" || {
    echo "error: the lock wants g++-$GXX, which this builder does not have: set build_tools_gxx: \"$GXX\"" >&2
    exit 1
}
prefix=/opt/farandole/mpi/$KEY
# On the file system where it will stay, so that it gets there at once.
stage=/opt/farandole/stage
rm -rf source "$stage"
mkdir -p source "$stage"
tar --extract --file "$TARBALL" --directory source --strip-components 1
cd source
for patch in $PATCHES; do
    echo "patch $patch"
    patch --strip=1 --fuzz=0 --forward <"../$patch"
done
# Its settings lie outside of what is packed: they are the node's own. CONFIGURE is a list of words.
# shellcheck disable=SC2086
./configure --prefix="$prefix" --sysconfdir=/etc/farandole/openmpi CC="gcc-$GXX" CXX="g++-$GXX" $CONFIGURE
make --jobs="$(nproc)"
make --jobs="$(nproc)" install DESTDIR="$stage"
cd ..
find "$stage" '(' -name '*.la' -o -name '*.a' ')' -delete
find "$stage$prefix/bin" "$stage$prefix/lib" -type f -exec sh -c 'file=$1
    if [ "$(head -c 4 "$file" | tail -c 3)" = ELF ]; then strip --strip-unneeded "$file"; fi' - {} ';'
mkdir -p /opt/farandole/mpi /opt/farandole/removing
# Renamed away before it is removed, so that nothing half ever has its name.
[ ! -e "$prefix" ] || mv "$prefix" "/opt/farandole/removing/$KEY.$$"
mv "$stage$prefix" "$prefix"
tar --create --use-compress-program='zstd -T0 -10' --file openmpi.tar.zst.part --sort=name --mtime='2020-01-01 UTC' \
    --owner=0 --group=0 --numeric-owner --directory /opt/farandole "mpi/$KEY"
mv openmpi.tar.zst.part openmpi.tar.zst
sha256sum openmpi.tar.zst >openmpi.tar.zst.sha256
rm -rf source "$stage" /opt/farandole/removing
