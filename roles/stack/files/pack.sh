# Packs an installed stack with its OpenMPI, or without it if it adds packages to another stack, BASE. ROOT, STACK, MPI,
# MODULES, JOB_USER, MANIFEST and CONTENTS come from the role.
stack=$ROOT/stacks/$STACK
mpi=$ROOT/mpi/$MPI
[ -e "$stack/manifest.json" ] || ln --symbolic --force --no-dereference "../../mpi/$MPI" "$stack/mpi"
# What does not load here loads nowhere. Not as root: another builder may have made what is installed.
(
    cd /
    runuser --user "$JOB_USER" -- "$stack/mpi/bin/mpirun" --version
    for module in $MODULES; do
        runuser --user "$JOB_USER" -- env HOME=/ TF_USE_LEGACY_KERAS=1 TF_CPP_MIN_LOG_LEVEL=2 \
            "$stack/venv/bin/python" -c "import $module"
    done
)
# What is not what was built is not packed: without its mark, and without the folders of the steps, it is built anew.
listed() {
    python3 -I -c "$CONTENTS" "$1" || {
        find .. -mindepth 1 -maxdepth 1 ! -name "${PWD##*/}" -exec rm -rf '{}' +
        rm -f "$stack/manifest.json"
        echo "error: run site.yml again, which builds the stack anew" >&2
        exit 1
    }
}
of_stack=$(listed "$stack")
of_mpi=$(listed "$mpi")
set -- "stacks/$STACK"
[ -n "$BASE" ] || set -- "$@" "mpi/$MPI"
unpacked=$(cd "$ROOT" && du --summarize --total --block-size=1 "$@" | tail -n 1 | cut -f 1)
printf '%s\n' "$MANIFEST" >"$stack/manifest.json.new"
mv "$stack/manifest.json.new" "$stack/manifest.json"
tar --create --use-compress-program="zstd -T0 -6" --file stack.tar.zst.part --sort=name \
    --mtime='2020-01-01 UTC' --owner=0 --group=0 --numeric-owner --directory "$ROOT" "$@"
mv stack.tar.zst.part stack.tar.zst
printf '{"sha256": "%s", "unpacked": %s, "stack": "%s", "mpi": "%s"}\n' \
    "$(sha256sum stack.tar.zst | cut -d ' ' -f 1)" "$unpacked" "$of_stack" "$of_mpi" >packed.json
