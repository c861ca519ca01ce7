"""Monitoring: who can reach it, whom it believes, when it alerts, what it shows."""

import base64
import json
import re
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterator, Sequence

import pytest
import yaml
from browser import browser, missing
from clusters import PREPARED, QUICK, ROOT, Cluster, until

from farandole.core.causes import causes
from farandole.monitor.settings import rules

NODES = 3
KIND = PREPARED
ON = {"monitoring_enabled": True, "firewall_enabled": True, "monitoring_interval": 5}
SITE = (*QUICK, "--extra-vars", json.dumps(ON))
OFF = (*QUICK, "--extra-vars", json.dumps({"firewall_enabled": True}))
UNITS = "farandole-prometheus farandole-node-exporter farandole-metrics.timer"
# Every 30 seconds a value: good for 20 of them, bad for 200, and good again.
GOOD, BAD, AGAIN = 20, 200, 200
# Minutes at which the alert is off, on, and off again.
BEFORE, DURING, AFTER = 8, 105, 195
DAY = 24 * 60
# What root on a node can let Prometheus read.
LIAR = """
import http.server

class Liar(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(LIES.encode())

http.server.HTTPServer(("", 9100), Liar).serve_forever()
"""


def gauge(good: str, bad: str) -> str:
    return f"{good}x{GOOD - 1} {bad}x{BAD - 1} {good}x{AGAIN - 1}"


def counter(step: int) -> str:
    return f"0x{GOOD - 1} 0+{step}x{BAD - 1} {step * (BAD - 1)}x{AGAIN - 1}"


TIME = f"0+30x{GOOD + BAD + AGAIN}"
OF, LIAR_OF = 'instance="node-1"', 'instance="liar"'
LINK = f'{OF},device="eth0"'
JOB_CERTIFICATE = f'{OF},file="/x/id_job-cert.pub"'
# That of a node which writes what it knows of itself, and for a while does not.
OLD = f"0+30x{GOOD - 1} {30 * GOOD}x{BAD - 1} {30 * (GOOD + BAD)}+30x{AGAIN - 1}"
# For each alert, the metrics that make it fire and stop.
SERIES = {
    "alert-node-silent": {f"up{{{OF}}}": gauge("1", "0"), f"farandole_head_left_out{{{OF}}}": gauge("0", "0")},
    "alert-clock": {
        f"node_time_seconds{{{OF}}}": f"0+30x{GOOD - 1} {30 * GOOD + 9}+30x{BAD - 1} {30 * (GOOD + BAD)}+30x{AGAIN - 1}"
    },
    "alert-disk": {
        f'node_filesystem_avail_bytes{{{OF},mountpoint="/"}}': gauge("50", "4"),
        f'node_filesystem_size_bytes{{{OF},mountpoint="/"}}': gauge("100", "100"),
    },
    "alert-health": {f'farandole_fault{{{OF},what="x"}}': gauge("_", "1")},
    "alert-unit": {f'farandole_failed_unit{{{OF},unit="x.service"}}': gauge("_", "1")},
    "alert-certificate": {
        f"farandole_certificate_days{{{JOB_CERTIFICATE}}}": gauge("300", "13"),
        f"farandole_certificate_lifetime_days{{{JOB_CERTIFICATE}}}": gauge("366", "366"),
        f'farandole_certificate_days{{{OF},file="/x/host-cert.pub"}}': gauge("3000", "3000"),
        f'farandole_certificate_lifetime_days{{{OF},file="/x/host-cert.pub"}}': gauge("3651", "3651"),
    },
    "alert-link-flaps": {f"node_network_carrier_changes_total{{{LINK}}}": counter(1)},
    "alert-link-slower": {f"node_network_speed_bytes{{{LINK}}}": gauge("1.25e9", "1.25e8")},
    "alert-link-errors": {
        f"node_network_receive_errs_total{{{LINK}}}": counter(30),
        f"node_network_transmit_errs_total{{{LINK}}}": gauge("0", "0"),
    },
    "alert-memory-errors": {f'farandole_gpu_ecc_uncorrected{{{OF},gpu="0"}}': counter(1)},
    "alert-memory-full": {f"node_vmstat_oom_kill{{{OF}}}": counter(1)},
    "alert-slots-idle": {
        f"farandole_head_slots_used{{{OF}}}": gauge("0", "2"),
        f'node_cpu_seconds_total{{{OF},cpu="0",mode="idle"}}': TIME,
    },
    "alert-verdict": {f"farandole_head_verdict{{{OF}}}": gauge("0", "2")},
    "alert-unproven": {f"farandole_head_unproven{{{OF}}}": gauge("_", "1"), f"up{{{OF}}}": gauge("1", "1")},
    "alert-left-out": {f"farandole_head_left_out{{{OF}}}": gauge("0", "1")},
    "alert-metrics-old": {
        f"up{{{OF}}}": gauge("1", "1"),
        f"node_time_seconds{{{OF}}}": TIME,
        f'node_textfile_mtime_seconds{{{OF},file="/x/node.prom"}}': OLD,
    },
}
# A folder that can only be read, of which a node may tell several times.
READ_ONLY = {
    f"node_time_seconds{{{OF}}}": TIME,
    **{f'node_filesystem_readonly{{{OF},mountpoint="/var",what="{word}"}}': gauge("0", "1") for word in "ab"},
}
# What else makes one fire: a node that answers and has not written what it knows of itself, inodes that are used up
# while there is space, a node that cannot write what it knows.
ALSO = [
    ("alert-health", {**READ_ONLY, f'node_textfile_mtime_seconds{{{OF},file="/x/node.prom"}}': OLD}),
    (
        "alert-metrics-old",
        {
            **SERIES["alert-metrics-old"],
            f'node_textfile_mtime_seconds{{{OF},file="/x/node.prom"}}': (
                f"0+30x{GOOD - 1} _x{BAD - 1} {30 * (GOOD + BAD)}+30x{AGAIN - 1}"
            ),
            f'node_textfile_mtime_seconds{{{OF},file="/x/control.prom"}}': TIME,
        },
    ),
    (
        "alert-disk",
        {
            f'node_filesystem_avail_bytes{{{OF},mountpoint="/"}}': gauge("50", "50"),
            f'node_filesystem_size_bytes{{{OF},mountpoint="/"}}': gauge("100", "100"),
            f'node_filesystem_files_free{{{OF},mountpoint="/"}}': gauge("50", "4"),
            f'node_filesystem_files{{{OF},mountpoint="/"}}': gauge("100", "100"),
        },
    ),
]
# What else does not fire: left out and silent, silent and without a file, silent and lost, a slow step of a run on a
# GPU, one of many processors that computes, a certificate that site.yml does not renew yet, an exporter that takes all
# for read-only.
QUIET = [
    ("alert-health", {**READ_ONLY, f'node_textfile_mtime_seconds{{{OF},file="/x/node.prom"}}': TIME}),
    ("alert-node-silent", {f"up{{{OF}}}": gauge("1", "0"), f"farandole_head_left_out{{{OF}}}": gauge("1", "1")}),
    ("alert-metrics-old", {f"up{{{OF}}}": gauge("0", "0")}),
    ("alert-unproven", {f"farandole_head_unproven{{{OF}}}": gauge("_", "1"), f"up{{{OF}}}": gauge("1", "0")}),
    (
        "alert-slots-idle",
        {**SERIES["alert-slots-idle"], f'farandole_gpu_busy_percent{{{OF},gpu="0"}}': gauge("0", "9")},
    ),
    (
        "alert-slots-idle",
        {
            f"farandole_head_slots_used{{{OF}}}": gauge("0", "2"),
            **{f'node_cpu_seconds_total{{{OF},cpu="{cpu}",mode="idle"}}': TIME for cpu in range(63)},
            f'node_cpu_seconds_total{{{OF},cpu="63",mode="idle"}}': gauge("0", "0"),
        },
    ),
    (
        "alert-certificate",
        {
            f"farandole_certificate_days{{{JOB_CERTIFICATE}}}": gauge("30", "11"),
            f"farandole_certificate_lifetime_days{{{JOB_CERTIFICATE}}}": gauge("30", "30"),
        },
    ),
]


def promtool(
    code: str,
    series: dict[str, str],
    firing: list[int],
    minutes: Sequence[int] = (BEFORE, DURING, AFTER),
    interval: str = "30s",
) -> dict[str, object]:
    """A test of promtool's: at which minutes an alert fires, also beside a node that sends everything twice."""
    expression = f'count by (instance) (ALERTS{{alertname="{code}",alertstate="firing"}})'
    samples = [{"labels": f"{{{of}}}", "value": 1} for of in (OF, LIAR_OF)]
    twice = [f'{LIAR_OF},severity="{word}",alertname="{word}"' for word in "ab"]
    return {
        "interval": interval,
        "input_series": [
            {"series": name.replace(OF, of), "values": values} for name, values in series.items() for of in (OF, *twice)
        ],
        "promql_expr_test": [
            {"expr": expression, "eval_time": f"{minute}m", "exp_samples": samples if minute in firing else []}
            for minute in minutes
        ],
    }


def prometheus(cluster: Cluster, query: str) -> list[dict[str, str]]:
    """What Prometheus answers on the head, as the labels of each result. In its first seconds it answers nothing."""
    url = f"http://127.0.0.1:909/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    program = f"import urllib.request as u; print(u.urlopen({url!r}).read().decode())"
    said: list[str] = []

    def answers() -> bool:
        done = cluster.ssh("node-1", "python3", "-c", program)
        said.append(done.stdout)
        return done.returncode == 0

    until(answers, 30)
    return [result["metric"] for result in json.loads(said[-1])["data"]["result"]]


def shown(cluster: Cluster) -> dict[str, set[str]]:
    """The codes of what farandole monitor tells of each node."""
    # It costs a second of a processor, and alerts take minutes.
    time.sleep(3)
    # After a start it has not measured them yet, or computed no alert, and is refused.
    said: list[subprocess.CompletedProcess[str]] = []

    def answers() -> bool:
        said.append(cluster.farandole("monitor", "--json"))
        return said[-1].returncode in (0, 1)

    until(answers, 60)
    alerts: dict[str, set[str]] = {}
    for one in json.loads(said[-1].stdout)["alerts"]:
        alerts.setdefault(one["host"], set()).add(one["code"])
    return alerts


def test_without_the_firewall_it_is_refused(cluster: Cluster) -> None:
    refused = cluster.play_failing(*QUICK, "--extra-vars", "monitoring_enabled=true")
    assert "[monitoring-open]" in refused.output and not refused.changes
    done = cluster.farandole("monitor", "--text")
    assert done.returncode == 2 and "the nodes are not watched" in done.stderr


def test_all_nodes_are_watched_and_a_second_run_changes_nothing(site: Cluster) -> None:
    until(lambda: len(prometheus(site, "up == 1")) == NODES, 60)
    assert {one["instance"] for one in prometheus(site, "up == 1")} == {"node-1", "node-2", "node-3"}
    until(lambda: len(prometheus(site, "count by (instance) (farandole_certificate_days > 14)")) == NODES, 90)
    of_job_user = prometheus(site, 'farandole_certificate_days{file="/etc/farandole/ssh/id_job-cert.pub"} > 14')
    assert [one["instance"] for one in of_job_user] == ["node-1"]
    again = site.play(*SITE)
    assert (again.rc, again.changes) == (0, set()), again.output


def test_the_head_learns_of_a_node_by_a_run_without_it(site: Cluster) -> None:
    known = "/var/lib/farandole/metrics/control.prom"
    site.shell("node-1", f"rm {known}")
    site.play_ok(*SITE, "--limit", "node-2")
    assert 'node="node-2"' in site.shell("node-1", f"cat {known}").stdout


def test_prometheus_cannot_fill_the_memory_of_the_head(site: Cluster) -> None:
    limit = "systemctl show --property MemoryMax --value farandole-prometheus"
    assert int(site.shell("node-1", limit).stdout) < int(
        site.shell("node-1", "free -b | awk 'NR == 2 {print $2}'").stdout
    )


def test_only_the_cluster_reaches_it(site: Cluster) -> None:
    ports = "ss -Hltn 'sport = 908 or sport = 909 or sport = 9100' | awk '{print $4}' | sort"
    assert site.shell("node-1", ports).stdout.split() == ["127.0.0.1:908", "127.0.0.1:909"]
    address = site.shell("node-2", "hostname -I").stdout.split()[0]
    assert site.shell("node-2", ports).stdout.split() == [f"{address}:9100"]
    reach = f"timeout 5 bash -c '</dev/tcp/{address}/9100'"
    assert site.shell("node-1", reach).returncode == 0
    # This machine is not in the cluster.
    with pytest.raises(TimeoutError):
        socket.create_connection((address, 9100), timeout=3)
    enabled = site.shell("node-1", "systemctl is-enabled prometheus prometheus-node-exporter").stdout.split()
    assert enabled == ["masked", "masked"]


def test_a_node_says_nothing_of_others(site: Cluster) -> None:
    lies = [
        'farandole_head_left_out{node="node-3"} 1',
        'farandole_head_verdict{instance="node-1"} 2',
        'farandole_fault{instance="node-3",what="lie"} 1',
        'farandole_head_verdict{node="node-3",__tmp_head="yes"} 2',
        'told{node="node-3"} 1',
        # Two that would be one alert.
        *(f'farandole_fault{{what="twin",severity="{word}",alertname="{word}"}} 1' for word in "ab"),
        # Too many to be read.
        *(f'farandole_fault{{what="{number}"}} 1' for number in range(200)),
    ]
    program = base64.b64encode(LIAR.replace("LIES", repr("\n".join(lies) + "\n")).encode()).decode()
    stop = "systemctl stop farandole-node-exporter"
    site.shell(
        "node-2", f"{stop}; echo {program} | base64 -d >/root/liar.py; systemd-run -u liar python3 /root/liar.py"
    )
    until(lambda: prometheus(site, "told"), 30)
    seen = {query: prometheus(site, query) for query in ("told", 'farandole_fault{what="lie"}')}
    believed = prometheus(
        site, 'farandole_head_left_out == 1 or farandole_head_verdict == 2 or farandole_fault{severity!=""}'
    )
    until(lambda: prometheus(site, 'ALERTS{alertname="alert-health",instance="node-2"}'), 30)
    few = prometheus(site, 'count by (instance) (ALERTS{alertname="alert-health",instance="node-2"}) <= 50')
    status = site.farandole("monitor", "--text").returncode
    site.shell("node-2", "systemctl stop liar; systemctl start farandole-node-exporter")
    assert [[one["instance"] for one in told] for told in seen.values()] == [["node-2"], ["node-2"]]
    assert (believed, status != 2, len(few)) == ([], True, 1)


def test_each_alert_fires_and_stops(site: Cluster) -> None:
    assert SERIES.keys() == {code for code, cause in causes().items() if cause.alert}
    tests = [promtool(code, series, [DURING]) for code, series in SERIES.items()]
    tests += [promtool(code, series, [DURING]) for code, series in ALSO]
    tests += [promtool(code, series, []) for code, series in QUIET]
    prove_alerts(site, "30s", tests)


def test_a_slow_link_is_told_for_months(site: Cluster) -> None:
    series = {f"node_network_speed_bytes{{{LINK}}}": f"1.25e9x{GOOD} 1.25e8x{80 * 24} 1.25e9x{4 * 24}"}
    slow, mended = [10 * DAY, 80 * DAY], 83 * DAY
    prove_alerts(site, "1h", [promtool("alert-link-slower", series, slow, [*slow, mended], "1h")])


def prove_alerts(site: Cluster, interval: str, tests: list[dict[str, object]]) -> None:
    """Whether promtool finds that alerts fire as these tests say."""
    text = yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": interval, "tests": tests})
    for name, content in (("rules.yml", rules()), ("test.yml", text)):
        encoded = base64.b64encode(content.encode()).decode()
        assert (
            site.shell("node-1", f"mkdir -p /root/alerts; echo {encoded} | base64 -d >/root/alerts/{name}").returncode
            == 0
        )
    done = site.shell("node-1", "cd /root/alerts && promtool check rules rules.yml && promtool test rules test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_for_grafana_asks_what_prometheus_knows(site: Cluster) -> None:
    panels = json.loads((ROOT / "roles/monitoring/files/grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    # These have no result here, where no GPU is and nothing fires.
    assert len(queries) > 8 and [query for query in queries if not prometheus(site, query)] == [
        query for query in queries if "gpu" in query or "ALERTS" in query or "slots" in query
    ]


def test_a_node_that_is_left_out_is_told_and_taken_back(site: Cluster) -> None:
    assert site.farandole("node exclude", "node-3", "--why", "a test").returncode == 0
    site.play_ok(*SITE)
    until(lambda: "alert-left-out" in shown(site).get("node-3", ()), 60)
    text = site.farandole("monitor", "--text")
    # A note is nothing to fix.
    assert text.returncode == 0 and "node-3: note: it is left out of runs and jobs [alert-left-out]" in text.stdout
    assert site.farandole("node include", "node-3", "--unproven").returncode == 0
    site.play_ok(*SITE)
    until(lambda: "node-3" not in shown(site), 60)


@pytest.fixture
def troubled(site: Cluster) -> Iterator[Cluster]:
    """A cluster in which much is wrong."""
    for script in (
        "printf '[Service]\\nExecStart=false\\n' >/run/systemd/system/broken.service; systemctl start broken",
        "for i in 1 2 3 4; do ip link set eth0 down; sleep 6; ip link set eth0 up; sleep 6; done",
    ):
        site.shell("node-2", f"systemd-run --collect sh -c {script!r}")
    site.shell(
        "node-2",
        'echo "farandole_fault{what=\\"<img src=x onerror=document.title=1>\\"} 1" '
        ">/var/lib/farandole/metrics/evil.prom",
    )
    site.farandole("validate", "--quick")
    site.shell("node-3", "systemctl stop farandole-metrics.timer")
    site.lab("fault", "fill", "node-1", "/tmp")  # noqa: S108
    yield site
    site.lab("fault", "heal", "node-1")


def test_what_is_wrong_is_seen_and_goes_away(troubled: Cluster) -> None:
    wanted = {
        "node-1": {"alert-health", "alert-verdict"},
        "node-2": {"alert-unit", "alert-link-flaps", "alert-health"},
        "node-3": {"alert-metrics-old"},
    }
    begun = time.monotonic()
    until(lambda: all(codes <= shown(troubled).get(name, set()) for name, codes in wanted.items()), 700)
    print(f"all seen after {time.monotonic() - begun:.0f} s")
    if not missing():
        look(troubled)
    troubled.lab("fault", "heal", "node-1")
    troubled.lab("fault", "pause", "node-3")
    troubled.shell("node-2", "rm /var/lib/farandole/metrics/evil.prom; systemctl reset-failed broken")
    until(lambda: "alert-node-silent" in shown(troubled).get("node-3", ()), 300)
    troubled.lab("fault", "resume", "node-3")
    troubled.shell("node-3", "systemctl start farandole-metrics.timer")
    gone = {"alert-health", "alert-unit", "alert-metrics-old", "alert-node-silent"}
    until(lambda: not gone & {code for codes in shown(troubled).values() for code in codes}, 300)


def look(cluster: Cluster) -> None:
    """The page in a browser."""
    way = cluster.begin("monitor")
    try:
        assert way.stdout
        address = way.stdout.readline().strip()
        with browser() as session:
            session.ask("url", {"url": address})
            until(lambda: "nodes answer" in session.run("return document.title"), 30)
            assert session.run("return document.title").startswith("3 of 3 nodes answer, ")
            page = session.run("return document.body.innerText")
            assert "<img src=x onerror" in page and "broken.service" in page
            # What was found in a month, how often and for how long.
            found = session.run("return document.getElementById('lemons').innerText")
            assert re.search(r"^node-2\s+alert-unit\s+1\s+\d", found, re.MULTILINE), found
            # It fires on the head.
            assert "alert-verdict" not in found
            session.picture(cluster.state / "monitor.png")
    finally:
        way.terminate()
        way.wait()


def test_a_full_disk_of_the_head_is_told_and_loses_nothing(site: Cluster) -> None:
    data = "/var/lib/farandole/prometheus"
    small = f"cp -a {data} /root/data && mount -t tmpfs -o size=64m data {data} && cp -a /root/data/. {data}"
    stop, start = "systemctl stop farandole-prometheus", "systemctl start farandole-prometheus"
    assert site.shell("node-1", f"{stop} && {small} && chown prometheus: {data} && {start}").returncode == 0
    until(lambda: site.farandole("monitor", "--text").returncode != 2)
    site.shell("node-1", f"dd if=/dev/zero of={data}/filler bs=1M")
    until(lambda: "df /var/lib/farandole/prometheus on node-1" in site.farandole("monitor", "--text").stderr, 600)
    site.shell("node-1", f"rm {data}/filler")
    until(lambda: site.farandole("monitor", "--text").returncode != 2, 600)
    assert len(prometheus(site, "up offset 10m")) == NODES
    site.shell("node-1", f"{stop} && umount {data} && {start}")


def test_nothing_is_left_of_it(site: Cluster) -> None:
    site.play_ok(*OFF)
    for node in ("node-1", "node-2"):
        left = site.shell(
            node, f"systemctl is-active {UNITS}; ls /etc/systemd/system | grep farandole; ls /var/lib/farandole"
        )
        assert "active" not in left.stdout.replace("inactive", "").split()
        assert left.stdout.splitlines()[3:] == ["farandole-firewall.service"]
        assert site.shell(node, "ls /etc/farandole/monitoring /usr/local/libexec/farandole/metrics").returncode != 0
    again = site.play(*OFF)
    assert (again.rc, again.changes) == (0, set()), again.output
