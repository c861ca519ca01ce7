"""What was validated on somebody's cluster, for the catalogue of others: no name of a host or a person, and signed."""

import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farandole.core import files
from farandole.core.errors import FarandoleError
from farandole.core.schema import UnfitError, fields, load, many, named, number, optional, whole, words, yes_or_no
from farandole.core.text import one_line
from farandole.validation.plan import MODULES, PARITY, TRAINING

FORMAT, LONGEST, NAMESPACE = 1, 1 << 20, "farandole-evidence"
VERSION, PACKAGE = words(r"[\w.+!~-]{1,64}"), words(r"[\w.-]{1,64}")
STATUS = words("green|slow|red|not measured")
CHECK = fields(
    {"id": words(r"[\w.<>-]{1,80}"), "status": STATUS, "value": optional(number), "code": words(r"[\w-]{0,64}")}
)
EVIDENCE = fields(
    {
        "format": whole(FORMAT, FORMAT),
        "date": words(r"20\d\d-\d\d-\d\d"),
        "farandole": VERSION,
        "lock": words("[0-9a-f]{12}"),
        "platform": named(words("os|arch|python"), VERSION),
        "accelerator": words("cpu|cuda"),
        "frameworks": many(words("tensorflow|pytorch")),
        "versions": named(PACKAGE, VERSION),
        "nodes": whole(4096, 1),
        "kernels": many(VERSION),
        "mbit": many(whole(10_000_000)),
        "rdma": yes_or_no,
        "gpus": many(whole(1024)),
        "quick": yes_or_no,
        "verdict": words("green|slow|red"),
        "checks": many(CHECK),
    }
)
SIGNED = fields(
    {"evidence": EVIDENCE},
    {"signature": words(r"-----BEGIN SSH SIGNATURE-----[A-Za-z0-9+/=\n]{1,8000}-----END SSH SIGNATURE-----\n?")},
)
Evidence = dict[str, Any]
# Checks that are named after a node or a folder, which may be somebody's home.
NAMED = {"trust": "<node>", "stack": "<node>", "node": "<node>", "files": "<folder>"}
# All other words of which the ids of checks consist.
WORDS = {
    *("accuracy", "all", "bandwidth", "efficiency", "gloo", "horovod", "latency", "limits", "mpi", "nccl", "network"),
    *("one", "pace", "parity", "predicted", "queue", "rdma", "speed", "training", "yardstick"),
    *MODULES.values(),
    *(sample.removesuffix(".py") for sample in (*TRAINING, *PARITY)),
}


def gather(result: Mapping[str, Any], lock: Mapping[str, Any], preflight: Mapping[str, Any], version: str) -> Evidence:
    """What may leave the cluster of a report: versions, numbers and verdicts. What a person has named stays there."""
    if result.get("stack") != lock["id"]:
        raise FarandoleError(
            f"the nodes have the stack {result.get('stack')}, not {lock['id']} of the lock: run site.yml"
        )
    names = result["hosts"]
    probes = {name: probe for name, probe in preflight.get("hosts", {}).items() if name in names and "machine" in probe}
    chosen = preflight.get("fabric", {}).get("interfaces", {})
    machines = [probe["machine"] for probe in probes.values()]
    links = [probe["machine"]["links"].get(chosen.get(name)) or {} for name, probe in probes.items()]
    own = {*lock.get("own", ()), *lock["wanted"].get("packages", ())}
    return checked(
        {
            "format": FORMAT,
            "date": result["time"][:10],
            "farandole": version,
            "lock": lock["id"],
            "platform": lock["platform"],
            "accelerator": lock["wanted"]["accelerator"],
            "frameworks": lock["wanted"]["frameworks"],
            "versions": {name: seen for name, seen in lock["versions"].items() if name not in own},
            "nodes": len(names),
            "kernels": sorted({machine["kernel"] for machine in machines}),
            "mbit": sorted({link["speed"] for link in links if link.get("speed")}),
            "rdma": any(port["active"] for machine in machines for port in machine["rdma"].values()),
            "gpus": sorted({machine["gpus"]["found"] for machine in machines}),
            "quick": result["quick"],
            "verdict": result["verdict"],
            "checks": [
                {"id": anonymous(check["id"]), **{key: check[key] for key in ("status", "value", "code")}}
                for check in result["checks"]
            ],
        }
    )


def anonymous(name_of_check: str) -> str:
    """The id of a check, in which only our own words stand; whatever else there is has been named by somebody."""
    kind = name_of_check.partition(".")[0]
    if kind in NAMED:
        return f"{kind}.{NAMED[kind]}"
    return ".".join(part if part in WORDS else "<name>" for part in name_of_check.split("."))


def checked(content: Any) -> Evidence:
    evidence: Evidence = EVIDENCE(content)
    return evidence


def canonical(evidence: Evidence) -> bytes:
    """What is signed."""
    return json.dumps(evidence, sort_keys=True, separators=(",", ":")).encode()


def write(path: Path, evidence: Evidence, key: Path | None) -> str:
    """Write it, signed if there is a key; returns who has signed."""
    content: dict[str, Any] = {"evidence": evidence}
    if key:
        command = ["ssh-keygen", "-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key)]
        done = subprocess.run(command, input=canonical(evidence), capture_output=True, check=False)
        if done.returncode:
            raise FarandoleError(f"{key} cannot sign: {one_line(done.stderr.decode(errors='replace'))}")
        content["signature"] = done.stdout.decode()
    files.write(path, json.dumps(content, indent=1) + "\n")
    return signer(content) if key else ""


def read(path: Path, signers: Path | None = None, *, unsigned: bool = False) -> tuple[Evidence, str]:
    """The evidence in a file, and the fingerprint of the key that has signed it: one of those, if any are given."""
    try:
        content = SIGNED(load(path.read_text(), LONGEST))
    except (OSError, UnicodeDecodeError) as error:
        raise FarandoleError(f"{path} cannot be read: {one_line(error)}") from None
    except UnfitError as error:
        raise FarandoleError(f"{path} is no evidence of `farandole validate --evidence`: {error}") from None
    if "signature" in content:
        return content["evidence"], signer(content, signers, path)
    if not unsigned or signers:
        raise FarandoleError(
            f"{path} is not signed, so anybody may have written or changed it; --unsigned takes it all the same"
        )
    return content["evidence"], ""


def signer(content: Mapping[str, Any], signers: Path | None = None, path: Path | None = None) -> str:
    """The fingerprint of the key that has signed; an error if that was something else, or somebody else."""
    with tempfile.TemporaryDirectory() as folder:
        signature = Path(folder) / "signature"
        signature.write_text(content["signature"])
        verify = ["ssh-keygen", "-Y"]
        verify += ["find-principals", "-f", str(signers)] if signers else ["check-novalidate", "-n", NAMESPACE]
        found = _ssh_keygen([*verify, "-s", str(signature)], b"" if signers else canonical(content["evidence"]))
        if signers and found.returncode == 0:
            who = found.stdout.decode().splitlines()[0]
            verify = ["ssh-keygen", "-Y", "verify", "-n", NAMESPACE, "-f", str(signers), "-I", who]
            found = _ssh_keygen([*verify, "-s", str(signature)], canonical(content["evidence"]))
        elif signers:
            raise FarandoleError(f"{path} is signed by a key that is not in {signers}: ask whoever sent it for theirs")
    if found.returncode:
        raise FarandoleError(f"{path} is not what was signed: somebody has changed it since, or made up its signature")
    return found.stdout.decode().split()[-1]


def _ssh_keygen(command: list[str], content: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, input=content, capture_output=True, check=False)


def row(evidence: Evidence, fingerprint: str) -> dict[str, str]:
    """It as a row of the catalogue, where it replaces what these people have seen of the same set before."""
    if evidence["quick"] or evidence["nodes"] < 2:
        raise FarandoleError(
            "no row was added: it is of a validation that was quick or of one node, and does not say whether the set "
            "works; take that of a whole one of at least two nodes, without --quick"
        )
    counts = Counter(check["status"] for check in evidence["checks"])
    seen = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    where = [f"kernel {' and '.join(evidence['kernels'])}" if evidence["kernels"] else ""]
    where += [f"{evidence['mbit'][0]} Mbit/s" if evidence["mbit"] else "", "RDMA" if evidence["rdma"] else ""]
    where += [f"{max(evidence['gpus'])} GPUs a node" if any(evidence["gpus"]) else "no GPU"]
    failed = sorted({check["code"] for check in evidence["checks"] if check["status"] == "red"} - {""})
    causes = f" ({', '.join(failed)})" if failed else ""
    return {
        "system": evidence["platform"]["os"],
        "date": evidence["date"],
        "verdict": "fails" if evidence["verdict"] == "red" or counts["red"] else "works",
        "ran": f"validation on {evidence['nodes']} nodes of others: {seen}{causes}; {', '.join(filter(None, where))}",
        "wanted": ",".join(evidence["frameworks"]),
        "by": fingerprint or "unsigned",
    }
