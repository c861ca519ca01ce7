# Puts an OpenMPI that was packed before in its place, all of it at once; ARCHIVE and KEY come from the role.
stage=/opt/farandole/stage
rm -rf "$stage"
mkdir -p "$stage" /opt/farandole/mpi /opt/farandole/removing
tar --extract --zstd --file "$ARCHIVE" --directory "$stage"
# Renamed away before it is removed, so that nothing half ever has its name.
[ ! -e "/opt/farandole/mpi/$KEY" ] || mv "/opt/farandole/mpi/$KEY" "/opt/farandole/removing/$KEY.$$"
mv "$stage/mpi/$KEY" "/opt/farandole/mpi/$KEY"
rm -rf "$stage" /opt/farandole/removing
