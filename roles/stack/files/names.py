# Refuses wheels whose programs have a path for a name: pip, which root runs, would write them there.
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import Path as Inside
from zipfile import ZipFile

for wheel in filter(Path.exists, map(Path, sys.argv[1:])):
    with ZipFile(wheel) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        for folder in sorted(folders):
            for program in PathDistribution(Inside(archive, f"{folder}/")).entry_points:
                if program.group in ("console_scripts", "gui_scripts") and "/" in program.name:
                    sys.exit(f"error: {wheel.name} would write its program to {program.name!a}: take it out")
