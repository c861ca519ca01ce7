"""The options that several commands have."""

import functools
import inspect
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from farandole.core.errors import FarandoleError
from farandole.core.findings import FindingsError
from farandole.core.project import ROOT
from farandole.inventory.reading import existing, named, only
from farandole.plays.playbook import Login


def known_tags(tags: str) -> str:
    """Refuse tags that no task has, with which a run would do nothing, or everything."""
    if tags:
        # Slow to import.
        from farandole.preflight.inventory import judge_tags

        roles = [path.name for path in (ROOT / "roles").iterdir()]
        if unknown := judge_tags([tag.strip() for tag in tags.split(",")], roles):
            raise FindingsError([replace(finding, severity="stop") for finding in unknown], "nothing was done:")
    return tags


def some_nodes(context: typer.Context, option: typer.CallbackParam, nodes: str) -> str:
    """Refuse an empty list, as of a shell's variable that is not set, which would mean all nodes."""
    source = context.get_parameter_source(str(option.name))
    if not nodes.strip(" ,") and source and source.name == "COMMANDLINE":
        raise FarandoleError(f"{option.opts[0]} names no node; for all of them, leave it out")
    return nodes


SETTING = "FARANDOLE_INVENTORY"
Inventory = Annotated[
    Path,
    typer.Option(
        "--inventory",
        "-i",
        callback=existing,
        default_factory=only,
        show_default="the only one in ./inventory",
        envvar=SETTING,
        help="The cluster's inventory, a folder or a file.",
    ),
]
# For commands that mean something else without one.
OneInventory = Annotated[
    Path | None,
    typer.Option("--inventory", "-i", callback=named, envvar=SETTING, help="Only this cluster, by its inventory."),
]
PrivateKey = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Log in to the nodes with this key.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the events as lines of JSON, for programs.")]
AsObject = Annotated[bool, typer.Option("--json", help="Print one object of JSON, for programs.")]
Hosts = Annotated[str, typer.Option(callback=some_nodes, help="Only these nodes, separated by commas.")]
Forks = Annotated[int | None, typer.Option("--forks", "-f", min=1, help="Nodes that work at the same time.")]
# What of site.yml is meant.
Limit = Annotated[str, typer.Option("--limit", "-l", callback=some_nodes, help="Only these nodes.")]
Tags = Annotated[str, typer.Option("--tags", "-t", callback=known_tags, help="Run only what has one of these tags.")]
SkipTags = Annotated[
    str, typer.Option(callback=known_tags, help="Leave out what has one of these tags; stack, for example.")
]
ExtraVars = Annotated[
    list[str] | None, typer.Option("--extra-vars", "-e", metavar="NAME=VALUE", help="Set a variable.")
]

# The options of each field of a Login; they have the same names as in ansible-playbook.
LOGIN: dict[str, Any] = {
    "user": Annotated[str, typer.Option("--user", "-u", help="Log in to the nodes as this user.")],
    "private_key": PrivateKey,
    "ask_pass": Annotated[bool, typer.Option("--ask-pass", "-k", help="Ask for the login password.")],
    "ask_become_pass": Annotated[bool, typer.Option("--ask-become-pass", "-K", help="Ask for the sudo password.")],
    "ask_vault_pass": Annotated[bool, typer.Option("--ask-vault-pass", "-J", help="Ask for the vault password.")],
    "vault_password_file": Annotated[Path | None, typer.Option(help="The file with the vault password.")],
}
# For commands that log in by themselves, and for those that read the inventory before Ansible can ask for its password.
BY_KEY = ("user", "private_key")
WITHOUT_VAULT = (*BY_KEY, "ask_pass", "ask_become_pass")


def words(options: Mapping[str, object], extra_vars: Iterable[str] | None = ()) -> list[str]:
    """The options that were given, as a command line has them."""
    given = [word for name, value in options.items() if value for word in (name, str(value))]
    return given + [word for assignment in extra_vars or () for word in ("--extra-vars", assignment)]


def as_given(inventory: Path, login: Login, more: Mapping[str, object] | None = None) -> str:
    """The options with which a hint means the same cluster and the same person."""
    names = {"-i": inventory, "--user": login.user, "--private-key": login.private_key}
    return shlex.join(words({**names, "--vault-password-file": login.vault_password_file, **(more or {})}))


def with_login(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options, by default all, in place of its parameter `login`."""
    offered = [field for field in fields(Login) if field.name in (names or LOGIN)]
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default) for field in offered
    ]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**arguments: Any) -> None:
            login = Login(**{option.name: arguments.pop(option.name) for option in options})
            command(**arguments, login=login)

        hints = {
            **get_type_hints(command, include_extras=True),
            **{option.name: LOGIN[option.name] for option in options},
        }
        own = [parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != "login"]
        parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in (*own, *options)]
        called.__annotations__ = hints
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return called

    return decorated
