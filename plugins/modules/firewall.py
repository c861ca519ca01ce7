#!/usr/bin/python
DOCUMENTATION = """
module: firewall
short_description: Restrict the ports that jobs use to the cluster's nodes
description:
  - Lets only the members connect to TCP and UDP ports above 1023, in an nftables table of its own. Ports below, the
    ports on which sshd listens, forwarded packets, and what the machine's own rules redirect are left alone.
  - Writes the table and a unit that loads it at boot and after nftables.service, and loads it in one transaction.
  - Compares what the kernel has loaded with what the file says, so it notices if somebody has flushed or changed it.
  - Warns of services that other machines can no longer reach.
options:
  members: {description: The addresses of the cluster's nodes., type: list, elements: str, required: true}
  open: {description: Ports or ranges that stay open to everybody., type: list, elements: str, default: []}
  ssh_port: {description: "A port of sshd, in addition to those that it names itself.", type: int, default: 22}
"""

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.folders import replacing

FILE = Path("/etc/farandole/firewall.nft")
UNIT = Path("/etc/systemd/system/farandole-firewall.service")
TABLE = "inet farandole"
FIRST, LAST = 1024, 65535
PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
# A packet that begins a TCP connection. Others of connections older than this table are let through.
OPENING = "tcp flags & (fin|syn|rst|ack) == syn"
RULES = """\
# Managed by Farandole, role firewall. In one transaction, so that there is no moment without it.
table {table}
delete table {table}
table {table} {{
\tset members4 {{ type ipv4_addr; {members4}}}
\tset members6 {{ type ipv6_addr; {members6}}}
\tchain input {{
\t\ttype filter hook input priority filter; policy accept;
\t\tiifname "lo" accept
\t\tct state established,related accept
\t\tip saddr @members4 accept
\t\tip6 saddr @members6 accept
\t\tct status dnat accept comment "what the machine's own rules redirect"
\t\ttcp dport {{ {tcp} }} accept
{udp}\t\ttcp dport {first}-{last} {opening} drop
\t\tudp dport {first}-{last} drop
\t}}
}}
"""
SERVICE = f"""\
# Managed by Farandole, role firewall.
[Unit]
Description=Farandole's firewall around the ports of jobs
DefaultDependencies=no
Wants=network-pre.target
Before=network-pre.target shutdown.target
Conflicts=shutdown.target
# That service removes all tables, this one's too, before it loads its own.
After=nftables.service
PartOf=nftables.service
ReloadPropagatedFrom=nftables.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/sbin/nft -f {FILE}
ExecReload=/usr/sbin/nft -f {FILE}
ExecStop=/usr/sbin/nft "table {TABLE}; delete table {TABLE}"

[Install]
WantedBy=sysinit.target nftables.service
"""
# The kernel's lists of sockets, by the state of those that wait for a client.
SOCKETS = {"0A": ("tcp", "tcp6"), "07": ("udp", "udp6")}

LOOPBACK6, MAPPED = "00000000000000000000000001000000", "0000000000000000FFFF0000"


def rules(members: list[str], ssh: set[int], opened: list[str]) -> str:
    """The table, in the language of nft."""
    ports = ", ".join([*map(str, sorted(ssh)), *opened])
    return RULES.format(
        table=TABLE, first=FIRST, last=LAST, opening=OPENING, tcp=ports,
        members4=elements(members, 4), members6=elements(members, 6),
        udp=f"\t\tudp dport {{ {', '.join(opened)} }} accept\n" if opened else "",
    )  # fmt: skip


def elements(members: list[str], version: int) -> str:
    addresses = sorted({address for text in members if (address := ip_address(text)).version == version})
    return f"elements = {{ {', '.join(map(str, addresses))} }}; " if addresses else ""


def ports_of(text: str) -> tuple[int, int]:
    """The first and the last port of a range."""
    if match := PORTS.fullmatch(text):
        first, last = int(match[1]), int(match[2] or match[1])
        if FIRST <= first <= last <= LAST:
            return first, last
    raise ValueError(f"{text} is neither a port from {FIRST} to {LAST} nor a range of them, such as 30000-32767")


def sshd_ports(module: AnsibleModule) -> set[int]:
    """The ports on which sshd listens, by its own words."""
    sshd = module.get_bin_path("sshd", required=True, opt_dirs=["/usr/sbin"])
    _, out, _ = module.run_command([sshd, "-T"], check_rc=True)
    return {int(port) for port in re.findall(r"^listenaddress \S+:(\d+)$", out, re.MULTILINE)}


def loaded(module: AnsibleModule, nft: str) -> bool:
    """Whether the kernel has what the file says, as a network namespace shows it in which the file is loaded too."""
    listing = [nft, "--stateless", "list", "table", *TABLE.split()]
    code, here, _ = module.run_command(listing)
    script = 'nft=$1 file=$2; shift 2; "$nft" -f "$file" && exec "$@"'
    _, there, _ = module.run_command(
        ["unshare", "--net", "sh", "-c", script, "sh", nft, str(FILE), *listing], check_rc=True
    )
    return bool(code == 0 and here == there)


def runs(module: AnsibleModule) -> bool:
    """Whether the unit is active as its file says, and enabled for the next boot."""
    asked = "--property=ActiveState,UnitFileState,NeedDaemonReload"
    _, out, _ = module.run_command(["systemctl", "show", asked, UNIT.name], check_rc=True)
    return {*out.split()} == {"ActiveState=active", "UnitFileState=enabled", "NeedDaemonReload=no"}


def closed_services(ours: list[tuple[int, int]], proc: Path = Path("/proc/net")) -> list[int]:
    """The ports above 1023 on which somebody listens for more than this machine itself, and that will be closed."""
    ports = set()
    for state, names in SOCKETS.items():
        for name in names:
            for row in (proc / name).read_text().splitlines()[1:] if (proc / name).exists() else []:
                _, local, _, now, *_ = row.split()
                address, port = local.split(":")
                if now == state and int(port, 16) >= FIRST and not is_loopback(address):
                    ports.add(int(port, 16))
    return sorted(port for port in ports if not any(first <= port <= last for first, last in ours))


def is_loopback(address: str) -> bool:
    """Whether an address in the kernel's list, where each word has its bytes reversed, is this machine's own."""
    return address == LOOPBACK6 or (address.endswith("7F") and address[:-8] in ("", MAPPED))


def write(module: AnsibleModule, path: Path, text: str, *validate: str) -> None:
    """Replace a file, once its draft is known to be valid."""
    with replacing(path, 0o644) as draft:
        draft.write(text.encode())
        draft.flush()
        if validate:
            module.run_command([*validate, draft.name], check_rc=True)


def main() -> None:
    """Write, load, and compare."""
    module = AnsibleModule(
        argument_spec={
            "members": {"type": "list", "elements": "str", "required": True},
            "open": {"type": "list", "elements": "str", "default": []},
            "ssh_port": {"type": "int", "default": 22},
        },
        supports_check_mode=True,
    )
    given: dict[str, Any] = module.params
    try:
        opened = [ports_of(text) for text in given["open"]]
    except ValueError as error:
        module.fail_json(msg=f"firewall_open: {error}")
    ssh = sshd_ports(module) | {given["ssh_port"]}
    wanted = {FILE: rules(given["members"], ssh, given["open"]), UNIT: SERVICE}
    stale = {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}
    nft = module.get_bin_path("nft", opt_dirs=["/usr/sbin"])
    due = bool(stale) or not (nft and runs(module) and loaded(module, nft))
    if FILE in stale and (ports := closed_services([*opened, *((port, port) for port in ssh)])):
        numbers = ", ".join(map(str, ports))
        module.warn(f"only the cluster's nodes can connect to ports {numbers} from now on, on which services of this "
                    "machine listen; if others need one of them, list it in firewall_open")  # fmt: skip
    if due and not module.check_mode:
        for path, text in stale.items():
            write(module, path, text, *([nft, "--check", "--file"] if path == FILE else []))
        for verb in (["daemon-reload"], ["enable", "--quiet", UNIT.name], ["reload-or-restart", UNIT.name]):
            module.run_command(["systemctl", *verb], check_rc=True)
        if not loaded(module, nft):
            module.fail_json(msg=f"the kernel does not have the table that {FILE} describes; nft list table {TABLE}")
    diff = {"before": FILE.read_text() if FILE.exists() and FILE not in stale else "", "after": ""}
    module.exit_json(changed=due, diff=diff)


if __name__ == "__main__":
    main()
