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
archived() {
    to=$1
    shift
    tar --create --use-compress-program="zstd -T0 -6" --file "$to.part" --sort=name --mtime='2020-01-01 UTC' \
        --owner=0 --group=0 --numeric-owner --directory "$ROOT" "$@"
    mv "$to.part" "$to"
    sha256sum "$to" | cut -d ' ' -f 1
}
sha256=$(archived stack.tar.zst "$@")
# For nodes that have the stack that is used now; not worth it if that has little of this one.
changed=
former=$(readlink "$ROOT/current" || :)
if [ -n "$former" ] && [ "$former" != "stacks/$STACK" ]; then
    beside=$(mktemp)
    (cd "$ROOT" && python3 -I -c "$CONTENTS" --beside "$former" "$@") >"$beside"
    changed=$(archived changes.tar.zst --no-recursion --null --verbatim-files-from --files-from "$beside")
    rm "$beside"
    [ "$(stat --format %s changes.tar.zst)" -lt "$(($(stat --format %s stack.tar.zst) * 3 / 4))" ] || changed=
fi
printf '{"sha256": "%s", "unpacked": %s, "stack": "%s", "mpi": "%s", "changes": {"sha256": "%s", "former": "%s"}}\n' \
    "$sha256" "$unpacked" "$of_stack" "$of_mpi" "$changed" "${changed:+${former#stacks/}}" >packed.json
