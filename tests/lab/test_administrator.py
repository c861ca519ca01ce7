"""Machines as an administrator leaves them, on which only `farandole apply` and `remove` work."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import partial

import pytest
import yaml
from clusters import Cluster, until

NODES = 2
ALL = [f"node-{number}" for number in range(1, NODES + 1)]
PACKAGES = (
    *("apparmor", "chrony", "curl", "git", "network-manager", "rsync", "sudo", "unattended-upgrades"),
    *("vim", "wget", "zstd"),
)
KIND = ("--kernel", "own", "--packages", ",".join(PACKAGES))
SITE = ("--skip-tags", "stack,build_tools")
PASSWORD = "a word: \"with' $signs"  # noqa: S105
# Who logs in is not root, and sudo asks for a password.
PREPARE = """
set -eu
useradd --create-home --shell /bin/bash --groups sudo maria
printf 'maria:%s\\n' "$1" | chpasswd
install -d -o maria -m 700 /home/maria/.ssh
install -o maria /root/.ssh/authorized_keys /home/maria/.ssh/
truncate --size 3G /srv/opt && mkfs.ext4 -q /srv/opt
cat >>/etc/fstab <<END
/srv/opt /opt ext4 loop 0 2
tmpfs /tmp tmpfs noexec,nosuid,nodev 0 0
END
printf 'APT::Periodic::%s "1";\\n' Update-Package-Lists Unattended-Upgrade >/etc/apt/apt.conf.d/20auto-upgrades
systemctl --quiet unmask apt-daily.timer apt-daily-upgrade.timer
systemctl --quiet enable apt-daily.timer apt-daily-upgrade.timer
address=$(ip -4 -o address show eth0 | awk '{print $4}')
gateway=$(ip -4 route show default | awk '{print $3}')
[ $2 = networking ] || printf 'auto lo\\niface lo inet loopback\\n' >/etc/network/interfaces
[ $2 = NetworkManager ] || systemctl --quiet disable NetworkManager
"""
NOT_ROOT = "echo PermitRootLogin no >/etc/ssh/sshd_config.d/own.conf && systemctl reload ssh"
# The lab comes by the address that a node's IPv6 gives itself by its MAC address.
NETWORKS = {
    "networking": "",
    "systemd-networkd": """
cat >/etc/systemd/network/eth0.network <<END
[Match]
Name=eth0
[Network]
Address=$address
Gateway=$gateway
END
systemctl --quiet enable systemd-networkd
""",
    "NetworkManager": """
umask 077
cat >/etc/NetworkManager/system-connections/eth0.nmconnection <<END
[connection]
id=eth0
type=ethernet
interface-name=eth0
[ipv4]
method=manual
address1=$address,$gateway
[ipv6]
method=link-local
addr-gen-mode=eui64
END
""",
}
FOLDERS = "/etc /usr/local /opt /root /home /lib/systemd /var/spool/cron"
# Settings, and not what the kernel counts.
COUNTED = (
    "^(fs[.].*(-nr|-state|nr_inodes)|kernel[.](random|ns_last_pid)|net[.]netfilter[.]nf_conntrack_(count|max|buckets))"
)
# All that a machine has, a line each.
STATE = f"""
find {FOLDERS} -xdev -printf '%p %y %M %u:%g %l\\n'
find {FOLDERS} -xdev -type f -exec sha256sum {{}} +
getent passwd | sed 's/^/account /'
getent group | sed 's/^/group /'
dpkg-query --show --showformat 'package ${{Package}} ${{Version}} ${{db:Status-Abbrev}}\\n'
systemctl list-unit-files --no-legend --plain --state enabled,disabled,masked | sed 's/^/unit /'
systemctl list-units --no-legend --plain --state failed | sed 's/^/failed /'
sysctl --all 2>/dev/null | grep -Ev '{COUNTED}'
findmnt --raw --noheadings --output TARGET,SOURCE,OPTIONS | grep -v ^/run/user | sed 's/^/mount /'
nft list ruleset
"""


ACCOUNTS = re.compile(r"/etc/(passwd|group|shadow|gshadow|subuid|subgid)-?\b")


def maria(cluster: Cluster, node: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script by the account that may log in."""
    return cluster.person_ssh("maria", cluster.inventory / ".ssh/id_ed25519", node, script)


def logs_in(cluster: Cluster, node: str) -> bool:
    return maria(cluster, node, "true").returncode == 0


def as_root(cluster: Cluster, node: str, script: str) -> list[str]:
    """Run a script as root, by sudo."""
    sudo = f"printf '%s\\n' {shlex.quote(PASSWORD)} | sudo --stdin --prompt '' sh -c {shlex.quote(script)}"
    done = maria(cluster, node, sudo)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def settings(cluster: Cluster) -> Iterator[None]:
    """The inventory's own settings say who logs in, and with which password."""
    folder = cluster.inventory / "group_vars"
    folder.mkdir(exist_ok=True)
    known = {"ansible_user": "maria", "ansible_become_password": PASSWORD}
    (folder / "cluster.yml").write_text(yaml.safe_dump(known))
    yield
    (folder / "cluster.yml").unlink()
    folder.rmdir()


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("kernel", ["own", "stock"])
def test_a_machine_is_left_as_it_was_found(cluster: Cluster, kernel: str) -> None:
    if kernel not in KIND:
        cluster.reset(NODES, "--kernel", kernel, *KIND[2:])
    # A kernel in user mode loses its interface if another program than ifupdown sets it up.
    nodes = dict(zip(ALL, ["networking"] * 2 if kernel == "own" else [*NETWORKS][1:], strict=True))
    for node, network in nodes.items():
        made = cluster.ssh(node, "sh", "-c", PREPARE + NETWORKS[network], "sh", PASSWORD, network)
        assert made.returncode == 0, made.stderr
    for node, network in nodes.items():
        cluster.lab("fault", "reboot", node)
        assert cluster.shell(node, NOT_ROOT).returncode == 0
        # A server that reads its settings again does not answer for a moment.
        until(partial(logs_in, cluster, node))
        assert "Permission denied" in cluster.ssh(node, "true").stderr
        active = as_root(cluster, node, f"systemctl is-active {' '.join(NETWORKS)} || :")
        assert active[[*NETWORKS].index(network)] == "active", (network, active)
        if kernel == "stock":
            assert as_root(cluster, node, "cat /sys/module/apparmor/parameters/enabled") == ["Y"]
    before = {node: as_root(cluster, node, STATE) for node in nodes}
    done = cluster.farandole("apply", *SITE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not cluster.play_ok(*SITE).changes
    login = "runuser -u trainer -- ssh -o BatchMode=yes node-2 hostname"
    assert as_root(cluster, "node-1", login) == ["node-2"]
    done = cluster.farandole("remove", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    for node in nodes:
        after = as_root(cluster, node, STATE)
        differ = sorted({*before[node]} ^ {*after})
        print(f"{node}: of {len(after)} lines {len(differ)} differ")
        # The account of those who start jobs is kept, as files may belong to it.
        assert [line for line in differ if "trainer" not in line and not ACCOUNTS.search(line)] == [], node
