# Puts a packed OpenMPI in its place. ARCHIVE comes from this role; STAGE, MPI and REPLACE from role stack.
rm -rf "$STAGE"
mkdir -p "$STAGE"
tar --extract --zstd --file "$ARCHIVE" --directory "$STAGE" --strip-components 2
sh -euc "$REPLACE" - "$MPI" "$STAGE"
