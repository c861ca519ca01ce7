"""List a folder of scripts in the form that write_files takes."""

from pathlib import Path

PROGRAMS = (".py", ".sh")
# How a program without suffix begins.
SHEBANG = "#!"


def folder_files(source: str, target: str, group: str) -> list[dict[str, str]]:
    """Every file below a folder of the control machine, except what editors and Python leave there."""
    root = Path(source)
    inside = sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    listed = (path for path in inside if not any(part.startswith((".", "__pycache__")) for part in path.parts))
    texts = {path: (root / path).read_text() for path in listed}
    return [
        {
            "path": f"{target}/{path}",
            "content": text,
            "mode": "0755" if path.suffix in PROGRAMS or text.startswith(SHEBANG) else "0644",
            "group": group,
        }
        for path, text in texts.items()
    ]
