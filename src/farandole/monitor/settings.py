"""The settings of the head's Prometheus: which nodes it reads, what it believes of whom, and when it alerts."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from farandole.core.causes import Cause, causes
from farandole.inventory.cluster import EXPORTER_PORT, HostVars, node_address
from farandole.links.examine import links_in
from farandole.report.verdict import VERDICTS, worst_verdict

# What a node can send at a time. One with 768 processors, each with ten values, sends 9,000.
LIMITS = {"sample_limit": 10_000, "label_limit": 40, "label_value_length_limit": 500, "body_size_limit": "8MB"}
MANAGED = "# Managed by Farandole, role monitoring.\n"
# Metrics whose names begin so are believed from the head alone.
OF_HEAD = "farandole_head_"
MARK = "__tmp_head"
# The labels that Prometheus gives alerts.
OF_ALERTS = "alertname|alertstate|severity"
# What an alert looks far back on: 90 days of all measurements took 14 ms of a processor for each link, every time.
HOURLY = {
    "record": "farandole_link_speed_hourly",
    # In the first two minutes of an hour, as monitoring_interval may be as long.
    "expr": "max by (instance, device) (max_over_time(node_network_speed_bytes[2h])) and on () minute() < 2",
}
# Alerts of one kind about a node; more could only be made up, and would hide those about others.
MOST = 50


def scrape(nodes: list[str], hostvars: HostVars, head: str, port: int, interval: int) -> str:
    """prometheus.yml. A node is called what the inventory calls it, whatever it says."""
    targets = [{"targets": [target(name, hostvars, head, port)], "labels": {"instance": name}} for name in nodes]
    relabel = [
        # A node may send them, too.
        {"regex": f"{MARK}|{OF_ALERTS}", "action": "labeldrop"},
        {"source_labels": ["instance"], "regex": head, "target_label": MARK, "replacement": "yes"},
        {"source_labels": ["__name__", MARK], "regex": f"{OF_HEAD}.*;", "action": "drop"},
        # What the head says of a node counts as that node's.
        {"source_labels": ["__name__", "node"], "regex": f"{OF_HEAD}.*;(.+)", "target_label": "instance"},
        {"regex": f"{MARK}|node", "action": "labeldrop"},
    ]
    job = {"job_name": "nodes", "static_configs": targets, "metric_relabel_configs": relabel, **LIMITS}
    # A node would decide what the head asks of whom.
    job["follow_redirects"] = False
    settings = {
        "global": {
            "scrape_interval": f"{interval}s",
            "scrape_timeout": f"{min(interval, 10)}s",
            "evaluation_interval": f"{interval}s",
        },
        "rule_files": ["rules.yml"],
        "scrape_configs": [job],
    }
    # Ansible's own kinds of strings become plain ones.
    return MANAGED + yaml.safe_dump(json.loads(json.dumps(settings)), sort_keys=False)


def target(name: str, hostvars: HostVars, head: str, port: int) -> str:
    """Where a node's exporter listens: where the other nodes reach it, and the head's where only the head does.

    What the head says is believed of all, so it says it on a port below 1024, which no account there can take."""
    if name == head:
        return f"127.0.0.1:{EXPORTER_PORT}"
    address = node_address(hostvars[name])
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def page() -> str:
    """The page that Prometheus serves."""
    style = resources.files("farandole.report").joinpath("page.css").read_text()
    return resources.files("farandole.monitor").joinpath("page.html").read_text().replace("STYLE", style, 1)


def rules() -> str:
    """rules.yml, from the catalogue of causes."""
    alerts = [rule(cause) for cause in causes().values() if cause.alert]
    groups = [{"name": "farandole", "rules": [HOURLY, *alerts]}]
    return MANAGED + yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000)


def rule(cause: Cause) -> dict[str, Any]:
    of_value = cause.shows.startswith("humanize")
    shown = "{{ $value | %s }}" if of_value else "{{ $labels.%s }}"
    told = {"host": "{{ $labels.instance }}", "seen": shown % cause.shows}
    # Two results that become equal as alerts, by labels that a node sends, would end the alert for all nodes.
    found = f"max by ({'instance' if of_value else f'instance, {cause.shows}'}) ({cause.alert})"
    return {
        "alert": cause.code,
        "expr": found if of_value else f"topk by (instance) ({MOST}, {found})",
        "for": cause.lasting,
        "labels": {"severity": cause.severity},
        "annotations": {"what": cause.description(told), "cure": cause.remedy(told)},
    }


def known(cluster: Mapping[str, Any]) -> str:
    """What only the control machine knows, for the head's exporter."""
    return "".join(f"{line}\n" for line in sorted(_known(cluster)))


def _known(cluster: Mapping[str, Any]) -> Iterator[str]:
    state = Path(cluster["state"])
    for name in cluster["trusted"]:
        yield f'{OF_HEAD}left_out{{node="{name}"}} {int(name in cluster["excluded"])}'
    for name, link in links_in(state / "preflight.json").get("nodes", {}).items():
        if name in cluster["trusted"]:
            if link["mb_per_s"]:
                yield f'{OF_HEAD}link_bytes{{node="{name}"}} {link["mb_per_s"] * 1e6:g}'
            if link["delay_us"]:
                yield f'{OF_HEAD}link_round_trip_seconds{{node="{name}"}} {link["delay_us"] / 1e6:g}'
    if last := worst_verdict(state, cluster["members"]):
        then = datetime.strptime(last["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        yield f"{OF_HEAD}verdict {VERDICTS.index(last['verdict'])}"
        yield f"{OF_HEAD}verdict_time_seconds {then.timestamp():.0f}"
