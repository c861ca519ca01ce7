# Puts an OpenMPI that was packed before in its place, all of it at once; ARCHIVE and KEY come from the role.
stage=/opt/farandole/stage
rm -rf "$stage"
mkdir -p "$stage" /opt/farandole/mpi
tar --extract --zstd --file "$ARCHIVE" --directory "$stage"
rm -rf "/opt/farandole/mpi/$KEY"
mv "$stage/mpi/$KEY" "/opt/farandole/mpi/$KEY"
rm -rf "$stage"
