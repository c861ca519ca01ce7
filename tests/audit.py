"""`make audit`: list everything that comes from outside, how it is pinned, and its known vulnerabilities."""

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

from farandole.core.table import table
from farandole.stack import catalogue
from farandole.stack.web import certificates, default_index

ROOT = Path(__file__).parents[1]
# These contain the very patterns that the audit looks for.
OWN = {"tests/audit.py", "tests/unit/test_audit.py"}
Texts = Mapping[str, str]

# Our programs that download, and what each checks before it uses a file.
FETCHERS = {
    "molecule/nccl/make_debs.py": "sha256 in the program itself",
    "plugins/module_utils/depot.py": "sha256 from the control machine",
    "plugins/modules/apt_source.py": "apt's signatures, by the key with the given fingerprint",
    "plugins/modules/source_fetch.py": "apt's signatures, then the catalogue's sha256",
    "src/farandole/stack/dataset.py": "sha256 in dataset.yml",
    "src/farandole/lab/image.py": "apt's signatures",
    "src/farandole/cli/bundle.py": "sha256 in requirements.txt",
    "src/farandole/stack/collect.py": "sha256 in the lock",
    "src/farandole/stack/sources.py": "sha256 in the lock",
    "src/farandole/stack/web.py": "nothing, sources.py checks",
}
FETCHING = re.compile(
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
# Host names without a dot belong to the cluster itself.
LOCAL = re.compile(r"[\w-]+|127\.0\.0\.1|example\.(org|com)|[\w.-]+\.(invalid|test)")
# An XML namespace is a name, which nothing fetches.
NAMESPACES = {"http://www.w3.org/2000/svg"}
DOCUMENTS = re.compile(r"\.(md|patch|j2)$|^LICENSE$|schema\.json$|^tests/(unit/logs|corpus)/")
# Ansible's modules that download without checking the content.
MODULES = {"apt_key", "get_url", "git", "pip", "rpm_key", "subversion"}


@dataclass
class Kind:
    """One kind of thing that comes from outside; `unpinned` lists those that nothing pins."""

    what: str
    where: str
    how: str
    count: int = 0
    unpinned: list[str] = field(default_factory=list)


def is_sha256(sha256: object) -> bool:
    """Whether this is a complete sha256 in lower case."""
    return bool(re.fullmatch(r"[0-9a-f]{64}", str(sha256)))


def tools(requirements: str, pyproject: str) -> Kind:
    """What `make setup` installs, including the build backend of this package."""
    found = Kind("Python tools", "requirements.txt", "sha256")
    names = set()
    for entry in re.split(r"\n(?=\S)", re.sub(r"(?m)^\s*#.*\n?", "", requirements).strip()):
        name, *hashes = entry.replace("\\\n", " ").split()
        names.add(canonicalize_name(name.partition("==")[0]))
        if "==" not in name or not hashes or not all(is_sha256(word.removeprefix("--hash=sha256:")) for word in hashes):
            found.unpinned.append(f"requirements.txt: {name}")
    for requirement in tomllib.loads(pyproject)["build-system"]["requires"]:
        if (name := canonicalize_name(re.split(r"[^\w.-]", requirement)[0])) not in names:
            found.unpinned.append(f"pyproject.toml: {name}, which builds this package, is not in requirements.txt")
    found.count = len(names)
    return found


def stack(known: catalogue.Catalogue) -> Kind:
    """Sources that the catalogue alone can put into a lock."""
    found = Kind("sources of the stack", "src/farandole/stack/catalogue.yml", "sha256")
    for row in known.rows("openmpi"):
        for source in known.sources(row):
            add(
                found, f"{found.where}: {row} from {source.get('url', 'a Debian source package')}", source.get("sha256")
            )
    for row in known.rows("horovod"):
        add(found, f"{found.where}: {row} from the index", row.data.get("sha256"))
    return found


def data(facts: Mapping[str, Any]) -> Kind:
    """The data that the samples train on."""
    found = Kind("training data", "src/farandole/stack/dataset.yml", "sha256")
    for file, sha256 in facts["mnist"]["files"].items():
        add(found, f"{found.where}: {file}", sha256)
    for thing in (facts["digits"], facts["digits"]["wheel"]):
        add(found, f"{found.where}: {thing.get('member') or thing.get('file')}", thing.get("sha256"))
    return found


def add(kind: Kind, name: str, sha256: object) -> None:
    """Count one more of a kind, and list it if it has no valid sha256."""
    kind.count += 1
    if not is_sha256(sha256):
        kind.unpinned.append(name)


def keys(facts: Mapping[str, Any]) -> Kind:
    """The keys that NVIDIA's packages are verified with."""
    found = Kind("keys of package sources", "roles/nccl/vars/main.yml", "OpenPGP fingerprint")
    for release, key in facts["__nccl_nvidia_keys"].items():
        found.count += 1
        if not re.fullmatch(r"[0-9A-F]{40}", str(key.get("fingerprint"))):
            found.unpinned.append(f"{found.where}: the key for {release}")
    return found


def programs(texts: Texts) -> Kind:
    """Programs that download, which must be in FETCHERS with what they check."""
    found = Kind("programs that download", "tests/audit.py, FETCHERS", "each checks")
    fetching = {path for path, text in texts.items() if path.endswith(".py") and FETCHING.search(text)}
    fetching -= {path for path in fetching if path.startswith("tests/")}
    found.count = len(fetching)
    found.unpinned = [
        f"{path}: downloads, but FETCHERS does not say what it checks" for path in sorted(fetching - {*FETCHERS})
    ]
    found.unpinned += [f"FETCHERS: {path} downloads nothing" for path in sorted({*FETCHERS} - fetching)]
    return found


def tasks(texts: Texts) -> Kind:
    """Tasks and commands that download; unpinned are those that do not check what they get."""
    found = Kind("tasks and commands that download", "each task or command", "sha256, or signatures")
    for path, text in texts.items():
        if path.endswith(".md"):
            continue
        lines = re.sub(r"\\\n\s*", " ", text).splitlines()
        for line in lines:
            if pip := PIP.search(line):
                found.count += 1
                if not any(words in pip[2] for words in CHECKED_PIP):
                    found.unpinned.append(f"{path}: {line.strip()}")
            if UNCHECKED.search(line):
                found.unpinned.append(f"{path}: {line.strip()}")
        if path.endswith(".yml") and path.startswith(("roles/", "playbooks/", "molecule/", "site")):
            for module, arguments in calls(yaml.safe_load(text)):
                found.count += 1
                if not (isinstance(arguments, dict) and arguments.get("checksum")):
                    found.unpinned.append(f"{path}: {module} without a checksum")
    return found


def calls(node: object) -> Iterator[tuple[str, object]]:
    """Uses of MODULES anywhere in a YAML file, with their arguments."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if str(key).removeprefix("ansible.builtin.") in MODULES:
            yield key, value
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from calls(child)


def addresses(texts: Texts, known: tuple[str, ...]) -> Kind:
    """URLs that are neither pinned by a checksum nor in a document."""
    found = Kind("other URLs in the code", "", "none allowed")
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            for url in URL.finditer(line.split("# ")[0]):
                fetched = url[0] not in NAMESPACES and not LOCAL.fullmatch(url[1])
                if fetched and not DOCUMENTS.search(path) and not url[0].startswith(known):
                    found.unpinned.append(f"{path}:{number}: {url[0]}")
    return found


def images(texts: Texts) -> Kind:
    """Anything that hosted CI or a container registry would provide."""
    found = Kind("CI actions, container images", "", "none allowed")
    for path, text in texts.items():
        if re.search(r"^\.(github|gitlab|circleci)|Dockerfile|Containerfile", path) or (
            path.endswith(".yml") and re.search(r"(?m)^\s*-? *(uses|image): *\S", text)
        ):
            found.unpinned.append(path)
    return found


def survey(root: Path = ROOT) -> list[Kind]:
    """All kinds, as found in this checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root, text=True, capture_output=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    files = {path: root / path for path in {*listed} - OWN}
    # The target of a symlink is read under its own name.
    present = {path: file for path, file in files.items() if file.is_file() and not file.is_symlink()}
    texts = {path: file.read_text(errors="replace") for path, file in present.items()}
    facts = yaml.safe_load(texts["src/farandole/stack/dataset.yml"])
    nccl = yaml.safe_load(texts["roles/nccl/vars/main.yml"])
    return [
        tools(texts["requirements.txt"], texts["pyproject.toml"]),
        stack(catalogue.load()),
        data(facts),
        keys(nccl),
        Kind("packages of the distribution", "apt on the nodes and in the lab", "apt's signatures, no sha256"),
        Kind("wheels of the stack", "stack.lock.yml", "sha256, written by farandole lock"),
        programs(texts),
        tasks(texts),
        addresses(texts, known(catalogue.load(), facts, nccl)),
        images(texts),
    ]


def known(versions: catalogue.Catalogue, facts: Mapping[str, Any], nccl: Mapping[str, Any]) -> tuple[str, ...]:
    """URLs of what the other kinds pin, and of the issues that the catalogue cites."""
    cited = re.findall(r"'thread': '([^']+)'", str(versions.components))
    sources = [source["url"] for row in versions.rows("openmpi") for source in versions.sources(row) if "url" in source]
    indexes = versions.data["cpu_builds"].values()
    return (
        versions.data["openmpi_site"].partition("{")[0],
        *cited,
        *sources,
        *indexes,
        *facts["mnist"]["sites"],
        nccl["__nccl_nvidia_uri"].partition("{{")[0],
    )


# Known vulnerabilities


def releases(requirements: str, known: catalogue.Catalogue) -> list[tuple[str, str]]:
    """Name and version of every Python release that is pinned or preferred, as on the package index."""
    tools = re.findall(r"(?m)^([\w.-]+)==([\w.]+)", requirements)
    sets = (one.versions.items() for one in known.evidence if one.works)
    wheels = {(name, Version(version).public) for one in sets for name, version in one if not known.is_component(name)}
    return sorted({*tools, *wheels})


def index() -> str:
    """The JSON API of pip's configured index; the simple API does not list vulnerabilities."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    own = re.findall(r"\.index-url='([^']+)'", listed.stdout)
    return re.sub(r"/simple/?$", "/pypi", own[-1] if own else default_index())


def vulnerabilities(name: str, version: str, source: str) -> list[str]:
    """Known vulnerabilities of a release that were not withdrawn, with the versions that fix them."""
    with urllib.request.urlopen(f"{source}/{name}/{version}/json", timeout=20, context=certificates()) as answer:  # noqa: S310
        listed = json.load(answer)["vulnerabilities"]
    return [
        f"{name} {version}: {one['id']}, fixed in {', '.join(one.get('fixed_in') or ()) or 'no release yet'}"
        for one in listed
        if not one.get("withdrawn")
    ]


def ask(wanted: list[tuple[str, str]], source: str) -> tuple[list[str], list[str]]:
    """Known vulnerabilities, and the releases that the index did not answer for: all if it fails on the first."""
    found: list[str] = []
    unanswered: list[str] = []
    for name, version in wanted:
        try:
            found += vulnerabilities(name, version, source)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            host = urllib.parse.urlsplit(source).hostname
            unanswered.append(f"{name} {version} ({host}: {getattr(error, 'reason', error)})")
            if (name, version) == wanted[0]:
                return found, [unanswered[0], *(" ".join(release) for release in wanted[1:])]
    return found, unanswered


def main() -> int:
    """Print the table; return 1 if anything is unpinned or has a known vulnerability."""
    kinds = survey()
    rows = [(kind.what, kind.where or "-", kind.how, str(kind.count or "-")) for kind in kinds]
    print(table([("what", "where it is pinned", "how", "count"), *rows]) + "\n")
    unpinned = [name for kind in kinds for name in kind.unpinned]
    print("\n".join(f"not pinned: {name}" for name in unpinned) or "everything that comes from outside is pinned")
    wanted = releases((ROOT / "requirements.txt").read_text(), catalogue.load())
    found, unanswered = ask(wanted, index())
    print("\n".join(f"known vulnerability: {one}" for one in found), end="\n" if found else "")
    if unanswered:
        print(f"known vulnerabilities: NO ANSWER for {len(unanswered)} of {len(wanted)} releases: {unanswered[0]}, …")
    elif not found:
        print(f"known vulnerabilities: none in {len(wanted)} releases")
    return int(bool(unpinned or found))


if __name__ == "__main__":
    sys.exit(main())
