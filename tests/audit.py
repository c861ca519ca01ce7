"""`make audit`: what comes from outside, where and how each is pinned, and which vulnerabilities are known of it."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import Version
from pip._internal.models.index import PyPI

from farandole.stack import catalogue
from farandole.stack.web import certificates
from farandole.table import table

ROOT = Path(__file__).parents[1]
# They hold what they look for.
OWN = {"tests/audit.py", "tests/unit/test_audit.py"}
Texts = Mapping[str, str]

# Programs of ours that fetch, and what each compares before a file counts.
FETCHERS = {
    "molecule/nccl/make_debs.py": "sha256 in it",
    "roles/nccl/library/apt_source.py": "apt's check of the signature by the key of a fingerprint",
    "plugins/modules/source_fetch.py": "apt's signatures, then sha256 of the catalogue",
    "src/farandole/dataset.py": "sha256 of dataset.yml",
    "src/farandole/fetching.py": "nodes: sha256 from the control machine; there: what its callers check",
    "src/farandole/lab/image.py": "apt's signatures",
    "src/farandole/stack/collect.py": "sha256 of the lock",
    "src/farandole/stack/sources.py": "sha256 of the lock",
    "src/farandole/stack/web.py": "what sources checks",
}
FETCHES = re.compile(
    r"\burlopen\(|\burlretrieve\(|\bbuild_opener\(|\bfetch_url\(|\bopen_url\(|\bHTTPS?Connection\(|\bimport requests\b|"
    r'^ +"mmdebstrap",|"download",|"--download-only"',
    re.MULTILINE,
)
UNCHECKED = re.compile(
    r"allow.?unauthenticated|allow.?insecure|trusted[=:] ?yes|no-check-certificate|(?<!emit-)trusted-host|CERT_NONE|"
    r"_create_unverified_context|verify=False|validate_certs: (false|no)|disable_gpg_check|"
    r"(curl|wget) +(-|http|\"|'|\$)|git clone (?!<this)",
    re.IGNORECASE,
)
PIP = re.compile(r"\bpip[\"']? (install|download) (?!--dry-run)(.*)")
CHECKED_PIP = ("--require-hashes", "--no-index", "--no-deps --no-build-isolation --editable .")
URL = re.compile(r"https?://([\w.-]+)[^\s\"'`<>)\]}]*")
# Names without a dot are those of a cluster's own machines.
NOWHERE = re.compile(r"[\w-]+|127\.0\.0\.1|example\.(org|com)|[\w.-]+\.(invalid|test)")
FOR_PEOPLE = re.compile(r"\.(md|patch|j2)$|^LICENSE$|schema\.json$")
# Brought by Ansible's modules without a look at their content.
MODULES = {"apt_key", "get_url", "git", "pip", "rpm_key", "subversion"}


@dataclass
class Kind:
    """One kind of thing that comes from outside; `loose` are those that nothing pins."""

    what: str
    where: str
    how: str
    count: int = 0
    loose: list[str] = field(default_factory=list)


def hashed(sha256: object) -> bool:
    """Whether it is one, to the letter."""
    return bool(re.fullmatch(r"[0-9a-f]{64}", str(sha256)))


def tools(requirements: str, pyproject: str) -> Kind:
    """What `make setup` installs, with the backend by which it then installs this package."""
    found = Kind("Python tools", "requirements.txt", "sha256")
    names = set()
    for entry in re.split(r"\n(?=\S)", re.sub(r"(?m)^\s*#.*\n?", "", requirements).strip()):
        name, *hashes = entry.replace("\\\n", " ").split()
        names.add(canonicalize_name(name.partition("==")[0]))
        if "==" not in name or not hashes or not all(hashed(word.removeprefix("--hash=sha256:")) for word in hashes):
            found.loose.append(f"requirements.txt: {name}")
    for wish in tomllib.loads(pyproject)["build-system"]["requires"]:
        if (name := canonicalize_name(re.split(r"[^\w.-]", wish)[0])) not in names:
            found.loose.append(f"pyproject.toml: {name}, which builds this package, is not in requirements.txt")
    found.count = len(names)
    return found


def stack(components: Mapping[str, Any]) -> tuple[Kind, Kind]:
    """Wheels and sources that a lock may name by the catalogue alone."""
    where = "src/farandole/stack/catalogue.yml"
    wheels, sources = Kind("wheels of the stack", where, "sha256"), Kind("sources of the stack", where, "sha256")
    for component, rows in components.items():
        for version, row in rows.items():
            for file, sha256 in (row or {}).get("files", {}).items():
                note(wheels, f"{where}: {file}", sha256)
            for source in [*(row or {}).get("sources", []), *([row] if row and "file" in row else [])]:
                note(
                    sources,
                    f"{where}: {component} {version} from {source.get('url', 'the index')}",
                    source.get("sha256"),
                )
    return wheels, sources


def data(facts: Mapping[str, Any]) -> Kind:
    """What the samples train on."""
    found = Kind("training data", "src/farandole/dataset.yml", "sha256")
    for file, sha256 in facts["mnist"]["files"].items():
        note(found, f"{found.where}: {file}", sha256)
    for thing in (facts["digits"], facts["digits"]["wheel"]):
        note(found, f"{found.where}: {thing.get('member') or thing.get('file')}", thing.get("sha256"))
    return found


def note(kind: Kind, name: str, sha256: object) -> None:
    """One more of a kind."""
    kind.count += 1
    if not hashed(sha256):
        kind.loose.append(name)


def keys(facts: Mapping[str, Any]) -> Kind:
    """By which NVIDIA's packages are believed."""
    found = Kind("keys of package sources", "roles/nccl/vars/main.yml", "OpenPGP fingerprint")
    for release, key in facts["__nccl_nvidia_keys"].items():
        found.count += 1
        if not re.fullmatch(r"[0-9A-F]{40}", str(key.get("fingerprint"))):
            found.loose.append(f"{found.where}: the key for {release}")
    return found


def programs(texts: Texts) -> Kind:
    """Code that fetches, and is known to check."""
    found = Kind("programs that fetch", "tests/audit.py, FETCHERS", "each checks")
    fetching = {path for path, text in texts.items() if path.endswith(".py") and FETCHES.search(text)}
    fetching -= {path for path in fetching if path.startswith("tests/")}
    found.count = len(fetching)
    found.loose = [
        f"{path}: fetches, and FETCHERS does not say what it checks" for path in sorted(fetching - {*FETCHERS})
    ]
    found.loose += [f"FETCHERS: {path} fetches nothing" for path in sorted({*FETCHERS} - fetching)]
    return found


def tasks(texts: Texts) -> Kind:
    """Tasks and commands that fetch without a look at what comes."""
    found = Kind("tasks and commands that fetch", "where they stand", "sha256, or signatures")
    for path, text in texts.items():
        if path.endswith(".md"):
            continue
        lines = re.sub(r"\\\n\s*", " ", text).splitlines()
        for line in lines:
            if pip := PIP.search(line):
                found.count += 1
                if not any(words in pip[2] for words in CHECKED_PIP):
                    found.loose.append(f"{path}: {line.strip()}")
            if UNCHECKED.search(line):
                found.loose.append(f"{path}: {line.strip()}")
        if path.endswith(".yml") and path.startswith(("roles/", "playbooks/", "molecule/", "site")):
            for module, arguments in calls(yaml.safe_load(text)):
                found.count += 1
                if not (isinstance(arguments, dict) and arguments.get("checksum")):
                    found.loose.append(f"{path}: {module} without a checksum")
    return found


def calls(node: object) -> Iterator[tuple[str, object]]:
    """The tasks of MODULES anywhere in a YAML file."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if str(key).removeprefix("ansible.builtin.") in MODULES:
            yield key, value
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from calls(child)


def addresses(texts: Texts, known: tuple[str, ...]) -> Kind:
    """URLs that stand neither beside a checksum nor in a text for people."""
    found = Kind("other addresses in the code", "", "none may be there")
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            for url in URL.finditer(line.split("# ")[0]):
                if not (FOR_PEOPLE.search(path) or NOWHERE.fullmatch(url[1]) or url[0].startswith(known)):
                    found.loose.append(f"{path}:{number}: {url[0]}")
    return found


def images(texts: Texts) -> Kind:
    """Things that a hosted CI or a container registry would bring."""
    found = Kind("CI actions, container images", "", "none may be there")
    for path, text in texts.items():
        if re.search(r"^\.(github|gitlab|circleci)|Dockerfile|Containerfile", path) or (
            path.endswith(".yml") and re.search(r"(?m)^\s*-? *(uses|image): *\S", text)
        ):
            found.loose.append(path)
    return found


def survey(root: Path = ROOT) -> list[Kind]:
    """All kinds, as they are in this checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root, text=True, capture_output=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    files = {path: root / path for path in {*listed} - OWN}
    # A link's file is read under its own name.
    there = {path: file for path, file in files.items() if file.is_file() and not file.is_symlink()}
    texts = {path: file.read_text(errors="replace") for path, file in there.items()}
    components = catalogue.load().components
    facts = yaml.safe_load(texts["src/farandole/dataset.yml"])
    nccl = yaml.safe_load(texts["roles/nccl/vars/main.yml"])
    return [
        tools(texts["requirements.txt"], texts["pyproject.toml"]),
        *stack(components),
        data(facts),
        keys(nccl),
        Kind("packages of the distribution", "the nodes' and the lab's apt", "apt's signatures, not by sha256"),
        Kind("what a user locks beyond these", "stack.lock.yml", "sha256, which farandole lock writes"),
        programs(texts),
        tasks(texts),
        addresses(texts, known(components, facts, nccl)),
        images(texts),
    ]


def known(components: Mapping[str, Any], facts: Mapping[str, Any], nccl: Mapping[str, Any]) -> tuple[str, ...]:
    """The addresses of what the other kinds pin, and the threads that the catalogue cites."""
    rows = [row for versions in components.values() for row in versions.values() if row]
    cited = re.findall(r"'thread': '([^']+)'", str(rows))
    sources = [source["url"] for row in rows for source in row.get("sources", []) if "url" in source]
    indexes = [row["index"] for row in rows if "index" in row]
    return (*cited, *sources, *indexes, *facts["mnist"]["sites"], nccl["__nccl_nvidia_uri"].partition("{{")[0])


# Known vulnerabilities


def releases(requirements: str, components: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every Python release that is pinned, as the package index knows it."""
    tools = re.findall(r"(?m)^([\w.-]+)==([\w.]+)", requirements)
    rows = [(name, version) for name, versions in components.items() for version, row in versions.items() if row]
    wheels = [(name, Version(version).public) for name, version in rows if "files" in components[name][version]]
    return sorted({*tools, *wheels})


def index() -> str:
    """Where pip's own index answers in JSON; its simple pages know no vulnerabilities."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    own = re.findall(r"\.index-url='([^']+)'", listed.stdout)
    return re.sub(r"/simple/?$", "/pypi", own[-1]) if own else PyPI.pypi_url


def vulnerabilities(name: str, version: str, source: str) -> list[str]:
    """What is known of one release and not withdrawn, with where it was mended."""
    with urllib.request.urlopen(f"{source}/{name}/{version}/json", timeout=20, context=certificates()) as answer:  # noqa: S310
        listed = json.load(answer)["vulnerabilities"]
    return [
        f"{name} {version}: {one['id']}, mended in {', '.join(one.get('fixed_in') or ()) or 'no release yet'}"
        for one in listed
        if not one.get("withdrawn")
    ]


def ask(wanted: list[tuple[str, str]], source: str) -> tuple[list[str], list[str]]:
    """What is known, and which releases were not answered for; all of them, when the first is not."""
    found: list[str] = []
    silent: list[str] = []
    for name, version in wanted:
        try:
            found += vulnerabilities(name, version, source)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            host = urllib.parse.urlsplit(source).hostname
            silent.append(f"{name} {version} ({host}: {getattr(error, 'reason', error)})")
            if (name, version) == wanted[0]:
                return found, [silent[0], *(" ".join(release) for release in wanted[1:])]
    return found, silent


def main() -> int:
    """The table; 1 when something is loose or known to be vulnerable."""
    kinds = survey()
    rows = [(kind.what, kind.where or "-", kind.how, str(kind.count or "-")) for kind in kinds]
    print(table([("what", "where it is pinned", "how", "count"), *rows]) + "\n")
    loose = [name for kind in kinds for name in kind.loose]
    print("\n".join(f"not pinned: {name}" for name in loose) or "everything that comes from outside is pinned")
    wanted = releases((ROOT / "requirements.txt").read_text(), catalogue.load().components)
    found, unasked = ask(wanted, index())
    print("\n".join(f"known vulnerability: {one}" for one in found), end="\n" if found else "")
    if unasked:
        print(f"known vulnerabilities: NOT ASKED for {len(unasked)} of {len(wanted)} releases, from {unasked[0]} on")
    elif not found:
        print(f"known vulnerabilities: none in {len(wanted)} releases")
    return int(bool(loose or found))


if __name__ == "__main__":
    sys.exit(main())
