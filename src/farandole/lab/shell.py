"""Run programs on this machine."""

import subprocess

from farandole.core.errors import FarandoleError


def run(*command: str, env: dict[str, str] | None = None) -> str:
    """Run a program and return its output; an error names the program and the reason."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise FarandoleError(f"`{' '.join(command)}` failed on this machine: {reason}")
    return done.stdout
