"""What only the head has: scripts of root there that print it, and that take it back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# A job is known by its number and by when it was submitted: with an empty spool, Slurm begins to count anew. The
# accounting lacks those that their people hold.
_SLURM = r"""
db=$(sed -n 's/^StorageLoc=//p' /etc/slurm/slurmdbd.conf)
cluster=$(sed -n 's/^ClusterName=//p' /etc/slurm/slurm.conf)
spool=$(sed -n 's/^StateSaveLocation=//p' /etc/slurm/slurm.conf)
version=$(slurmctld -V | sed -E 's/.* ([0-9]+\.[0-9]+).*/\1/')
queued() { squeue --noheader --format=%F@%V | sort -u; }
ask() { mariadb --batch --skip-column-names --execute "$1"; }
ask_as_slurm() { runuser -u slurm -- mariadb --batch --skip-column-names --execute "$1"; }
"""
_SAVE_ACCOUNTING = r"""
{
    echo "-- $version $(queued | paste --serial --delimiters=' ')"
    mariadb-dump --single-transaction --quick "$db"
} | gzip
"""
# Not root, but slurm reads what another head has written, also once it is in MariaDB: there may be views that run what
# root may. The tables, of whatever names, change places in one statement.
_LOAD_ACCOUNTING = r"""
new=${db}_restored old=${db}_replaced
# On a full disk MariaDB does not fail, but waits.
folder=$(ask "SELECT @@datadir") needed=$((64 + 16 * $2 / 1048576))
free=$(df --output=avail --block-size=1M "$folder" | tail -n 1)
if [ "$free" -lt "$needed" ]; then
    echo "$folder has" $free "MiB free, but restoring the accounting needs $needed MiB: free some space" >&2
    exit 1
fi
trap 'ask "DROP DATABASE IF EXISTS $new; DROP DATABASE IF EXISTS $old"; systemctl start slurmdbd slurmctld' EXIT
ask "DROP DATABASE IF EXISTS $new; DROP DATABASE IF EXISTS $old; CREATE DATABASE $new; CREATE DATABASE $old;
    GRANT ALL ON $new.* TO slurm@localhost"
known=$(runuser -u slurm -- gzip --decompress --stdout | {
    read -r _ saved jobs
    if [ "$saved" != "$version" ]; then
        echo "its Slurm is $version, and the backup is of $saved: a head with that one can take it" >&2
        exit 1
    fi
    runuser -u slurm -- mariadb "$new" >&2
    echo "$jobs" | tr ' ' '\n'
})
# After an interruption it is stopped, and may have no spool.
jobs=""
if [ -e "$spool" ]; then
    systemctl start slurmctld || [ "$1" = True ]
    for i in $(seq 20); do scontrol ping | grep -q DOWN || break; sleep 0.5; done
    # It may be damaged.
    jobs=$(queued) || [ "$1" = True ]
fi
systemctl stop slurmctld slurmdbd
lost=$(comm -23 <(echo "$jobs") <(echo "$known" | sort -u) | cut -d @ -f 1)
lost="$lost $(ask_as_slurm "SELECT id_job FROM $db.${cluster}_job_table was
    LEFT JOIN $new.${cluster}_job_table now USING (id_job, time_submit) WHERE now.id_job IS NULL")"
if [ -n "$(echo $lost)" ] && [ "$1" != True ]; then
    echo "its queue has jobs that the backup lacks ($(echo $lost | tr ' ' '\n' | sort -nu | head -n 20 | xargs));" \
        "nothing was changed. To forget them: --replace" >&2
    exit 1
fi
name="CONCAT('.\`', REPLACE(table_name, '\`', '\`\`'), '\`')"
moves=$(ask "SELECT CONCAT(table_schema, $name, ' TO ', IF(table_schema = '$db', '$old', '$db'), $name)
    FROM information_schema.tables WHERE table_schema IN ('$db', '$new') ORDER BY table_schema = '$new'")
ask "RENAME TABLE $(echo "$moves" | paste -sd ,); DROP DATABASE $new; DROP DATABASE $old;
    REVOKE ALL ON $new.* FROM slurm@localhost"
systemctl start slurmdbd
trap - EXIT
echo "jobs: $(ask_as_slurm "SELECT COUNT(*) FROM $db.${cluster}_job_table")"
"""
# slurmctld replaces its files while they are read.
_SAVE_QUEUE = """
runuser -u slurm -- tar --create --gzip --directory "$spool" . || [ $? = 1 ]
"""
# Nobody knows which of the jobs have run since, so none starts again by itself: the partitions are down meanwhile.
_LOAD_QUEUE = r"""
systemctl stop slurmctld
runuser -u slurm -- bash -euc '
    rm -rf "$1.restored" && mkdir -m 0700 "$1.restored" && tar --extract --gzip --directory "$1.restored"
    rm -rf "$1.replaced" && { [ ! -e "$1" ] || mv "$1" "$1.replaced"; } && mv "$1.restored" "$1"
' bash "$spool"
sed -i '/^PartitionName=/s/State=UP/State=DOWN/' /etc/slurm/slurm.conf
trap "sed -i '/^PartitionName=/s/State=DOWN/State=UP/' /etc/slurm/slurm.conf" EXIT
systemctl start slurmctld
for i in $(seq 60); do
    ! scontrol ping | grep -q DOWN && ! sinfo --noheader --Node --format=%T | grep -qE 'unk|\*' && break
    sleep 0.5
done
for job in $(squeue --noheader --states=RUNNING,SUSPENDED --format=%F | sort -u); do
    scontrol update "jobid=$job" requeue=0 || : # it may have ended
done
held=0
for job in $(squeue --noheader --states=PENDING --format='%F %r' | grep -v JobHeld | cut -d ' ' -f 1 | sort -u); do
    scontrol uhold "$job"
    held=$((held + 1))
done
sed -i '/^PartitionName=/s/State=DOWN/State=UP/' /etc/slurm/slurm.conf
systemctl restart slurmctld
runuser -u slurm -- rm -rf "$spool.replaced"
echo "waiting jobs that are held, as they may have run since: $held; each person starts theirs: scontrol release JOB"
"""
_HOME = """
home=$(getent passwd "$1" | cut -d : -f 6)
"""
# Whoever is new in cluster_users has none before the next run.
_ACCOUNT = f"""
getent passwd "$1" >/dev/null || {{ echo "nothing to save, as there is no account yet" >&2; exit 0; }}
{_HOME}"""
REFUSE_STRANGERS = """
missing=$(for name; do getent passwd "$name" >/dev/null || echo "$name"; done)
[ -z "$missing" ] || {
    echo "the head does not have" $missing "yet; nothing was changed. First run farandole apply" >&2
    exit 1
}
"""
# Only as the account itself, as root would follow what it has made there.
_SAVE_HOME = """
runuser -u "$1" -- tar --create --gzip --sparse --one-file-system --ignore-failed-read --directory "$home" . 9<&- ||
    [ $? = 1 ]
"""
# What is there stays. It is complete before any of it has its name, so that nothing incomplete stays, either.
_LOAD_HOME = r"""
merge=$(cat <<'END'
import os, shutil, sys
made = []
for folder, folders, files in os.walk(sys.argv[1]):
    for path in (os.path.join(folder, name) for name in folders + files):
        target = os.path.relpath(path, sys.argv[1])
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                os.mkdir(target)
                made.append((path, target))
            else:
                os.link(path, target, follow_symlinks=False)
        except FileExistsError:
            pass
for path, target in reversed(made):
    shutil.copystat(path, target)
END
)
runuser -u "$1" -- sh -euc '
    cd "$1" && rm -rf .restored-*
    new=$(mktemp -d .restored-XXXXXX) && trap "rm -rf $new" EXIT
    tar --extract --gzip --directory "$new"
    python3 -I -c "$2" "$new"
' sh "$home" "$merge" 9<&-
"""
_SAVE_RUNS = r"""
runuser -u "$1" -- sh -euc '
    mkdir -m 0700 -p "$1/runs" && cd "$1/runs"
    find . -maxdepth 2 -type f \( -path "./[1-9]*/*.json" -o -path "./[1-9]*/output" -o -name .last \) -print0 |
        tar --create --gzip --sparse --null --files-from=- || [ $? = 1 ]
' sh "$home" 9<&-
"""
# A run of that number may have been started here since; it stays.
_LOAD_RUNS = r"""
runuser -u "$1" -- sh -euc '
    mkdir -m 0700 -p "$1/runs" && cd "$1/runs"
    rm -rf .restored-* && new=$(mktemp -d .restored-XXXXXX) && tar --extract --gzip --directory "$new"
    for run in "$new"/[1-9]* "$new/.last"; do
        [ ! -e "$run" ] || [ -e "${run##*/}" ] || mv "$run" .
    done
    rm -rf "$new"
' sh "$home" 9<&-
"""
# A script that another command has started may still be at work. Nobody but root can open the file and keep its lock.
ALONE = """
mkdir -p /run/farandole
(umask 077 && : >>/run/farandole/backup)
exec 9</run/farandole/backup
if ! flock --timeout 60 9; then
    echo "another backup or restore is at work there: fuser -v /run/farandole/backup" >&2
    exit 1
fi
"""
_SAVE = {"accounting": _SLURM + _SAVE_ACCOUNTING, "queue": _SLURM + _SAVE_QUEUE, "homes": _ACCOUNT + _SAVE_HOME}
_SAVE["runs"] = _ACCOUNT + _SAVE_RUNS
_LOAD = {"accounting": _SLURM + _LOAD_ACCOUNTING, "queue": _SLURM + _LOAD_QUEUE, "homes": _HOME + _LOAD_HOME}
_LOAD["runs"] = _HOME + _LOAD_RUNS
ENDING = ".gz"


@dataclass(frozen=True)
class Part:
    """Something that the head has, in a file of a backup."""

    file: str
    kind: str
    # Whose it is; empty if it is the cluster's.
    account: str = ""

    @property
    def save(self) -> str:
        """The script that prints it."""
        return ALONE + _SAVE[self.kind]

    @property
    def load(self) -> str:
        """The script that reads it, and says what it did."""
        return ALONE + _LOAD[self.kind]

    @property
    def words(self) -> str:
        return f"the {self.kind}{f' of {self.account}' if self.account else ''}"


def wanted(accounts: Sequence[str], *, queue: bool, homes: bool) -> list[Part]:
    """What to save; runs are in the homes."""
    kinds = ["accounting", "queue"] if queue else []
    own = "homes" if homes else "runs"
    return [
        *(Part(f"{kind}{ENDING}", kind) for kind in kinds),
        *(Part(f"{own}/{account}{ENDING}", own, account) for account in accounts),
    ]


def saved(folder: Path) -> Iterator[Part]:
    """What was saved: first the accounting, on which the queue depends, then that, which stands still meanwhile."""
    for path in sorted(folder.rglob(f"*{ENDING}"), key=lambda path: (path.parent != folder, path)):
        name = path.relative_to(folder)
        kind, account = (name.parts[0], path.stem) if len(name.parts) > 1 else (path.stem, "")
        if kind in _LOAD:
            yield Part(str(name), kind, account)
