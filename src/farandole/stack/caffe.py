"""The archive with Intel Caffe that the user brings."""

import re
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.files import sha256


def archive(path: str, good: str, beside: str) -> dict[str, Any]:
    """Check the archive and describe it, as the action send_files takes it."""
    file = Path(beside) / Path(path).expanduser()
    if not re.fullmatch(r"[0-9a-f]{64}", good):
        raise FarandoleError(
            f"caffe_sha256 is {good or 'empty'}, not the sha256 of caffe_archive: set it to what its builder "
            f"published, or to what `sha256sum {file}` prints if you packed it yourself"
        )
    if not file.is_file():
        raise FarandoleError(f"caffe_archive: {file} is not a file on the control machine")
    if (got := sha256(file)) != good:
        raise FarandoleError(
            f"caffe_archive: the sha256 of {file} is {got}, but caffe_sha256 is {good}: fetch the archive again, or "
            "correct caffe_sha256"
        )
    return {"path": str(file), "name": f"caffe/{good[:16]}.tar", "sha256": good, "size": file.stat().st_size}
