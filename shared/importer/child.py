"""The importing child process: `python -m stageloom.shared.importer.child REQUEST` does everything that a
hostile file could turn against its reader, under limits, and leaves an artifact and a report in its scratch
folder.

It talks by files and stdout: progress as lines, the outcome as `result.json`, which holds either the report
or the error; the exit code is 64 + errno if the disk fails. It ends when its stdin does, so it does not
outlive the process that wanted the import.
"""

import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

from stageloom.shared.errors import ModelError, NotNow, UnpinnedShape
from stageloom.shared.importer.process import RESULT_NAME, STORAGE_EXIT, ImportLimits, within_host


def main(arguments: list[str]) -> int:
    """Run the import that the request file describes; 0 whenever a result was written."""
    request = json.loads(Path(arguments[0]).read_text())
    limits = ImportLimits(**request["limits"])
    _limit(resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes)
    _limit(resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    scratch = Path(request["scratch"])
    try:
        # Imported under the limits: the libraries' own start-up counts.
        from stageloom.shared.importer.pipeline import import_here, inputs_here

        path = Path(request["path"])
        outcome: dict[str, Any]
        if request["inputs_only"]:
            outcome = {"report": {"inputs": inputs_here(path, limits)}}
        else:
            report = import_here(path, request["shapes"], scratch, limits, _progress, request["smallest"])
            outcome = {"report": report.to_json()}
    except UnpinnedShape as error:
        outcome = {
            "unpinned": [
                [open_input.name, open_input.claimed, open_input.example] for open_input in error.inputs
            ]
        }
    except ModelError as error:
        outcome = {"error": [error.cause, error.remedy, isinstance(error, NotNow)]}
    except MemoryError:
        outcome = {"exhausted": True}
    except OSError as error:
        return _storage_code(error)
    except ModuleNotFoundError as error:
        outcome = {"missing": error.name}
    except Exception as error:  # the top of this process: whatever a hostile file provokes is reported
        outcome = {"crashed": " ".join(f"{type(error).__name__}: {error}".split())}
    try:
        (scratch / RESULT_NAME).write_text(json.dumps(outcome))
    except OSError as error:
        return _storage_code(error)
    return 0


def _limit(which: int, soft: int, hard: int) -> None:
    """Lower both limits as far as wanted; those of the host may be lower already."""
    resource.setrlimit(which, (within_host(which, soft), within_host(which, hard)))


def _storage_code(error: OSError) -> int:
    """A full disk takes no result file, so the exit code carries the reason."""
    return STORAGE_EXIT + (error.errno or 0) % STORAGE_EXIT


def _end_with_stdin() -> None:
    while os.read(0, 1):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    os._exit(1)


def _progress(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # nothing that the libraries do at exit matters, and it may fail under the limits
