"""Runs PyTorch's own FSDP tests on the CPU, with torch's classes or with ours, and prints what became of them.

    python -m tests.conformance --sources DIR --subject torch     what passes without a GPU: the tests that count
    python -m tests.conformance --sources DIR --subject compat    those tests, with fsdp_compile.compat in the place
    python -m tests.conformance                                   only the table, of the results that are there

The tests are PyTorch's and are not part of this project: DIR is a checkout's test/distributed, or a folder that holds
one. Results of several runs, of some files each, add up in one folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conformance.convert import convert, module_of
from tests.conformance.results import Results, in_table, read_reasons

ROOT = Path(__file__).parents[2]
GRACE = 30  # seconds a test may take beyond its ranks' limit


def main() -> None:
    arguments = parse()
    results = Results(arguments.results)
    if arguments.sources is not None:
        with tempfile.TemporaryDirectory() as folder:
            files = convert(arguments.sources, arguments.files, Path(folder))
            wanted = tests_to_run(files, Path(folder), results, arguments)
            if wanted:
                run(files, Path(folder), arguments, record=results.file(arguments.subject), wanted=wanted)
    print(in_table(results, read_reasons()))


def parse() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser("python -m tests.conformance", description=__doc__.partition("\n")[0])
    parser.add_argument("--sources", type=Path, help="PyTorch's test/distributed, or a folder that holds one")
    parser.add_argument("--subject", choices=["torch", "compat"], default="torch", help="whose classes are tested")
    parser.add_argument("--files", default="", help="a part of the files' names, with *")
    parser.add_argument("--tests", default="", help="a part of the tests' names")
    parser.add_argument("--each-function-once", action="store_true", help="one set of parameters of each test function")
    parser.add_argument("--again", choices=["all", "failed", "none"], default="none", help="of tests with a result")
    parser.add_argument("--world", type=int, choices=[2, 4], default=2, help="the number of ranks (2)")
    parser.add_argument("--backend", default="aot_eager", help="what compat compiles with (aot_eager)")
    parser.add_argument("--limit", type=int, default=600, help="seconds that a test may take (600)")
    parser.add_argument("--results", type=Path, default=Path("conformance-results"), help="a folder, made if absent")
    return parser.parse_args()


def tests_to_run(files: list[str], folder: Path, results: Results, arguments: argparse.Namespace) -> list[str]:
    """The tests that are asked for and have no result yet.

    With compat, those that have passed with torch's classes and are applicable, if these have been run.
    """
    if not set(files) <= {test.partition("::")[0] for test in results.collected()}:
        listed = folder / "collected.jsonl"
        run(files, folder, arguments, record=listed, wanted=None)
        results.collect(listed)
    function_of = results.collected()
    chosen = [test for test in function_of if test.partition("::")[0] in files and arguments.tests in test]
    if arguments.subject == "compat" and results.of("torch"):
        reasons = read_reasons()
        passed = {test for test, result in results.of("torch").items() if result["outcome"] == "passed"}
        chosen = [test for test in chosen if test in passed and reasons.of(test) is None]
    if arguments.each_function_once:
        first = {(test.partition("::")[0], function_of[test]): test for test in reversed(chosen)}
        chosen = [test for test in chosen if test in first.values()]
    before = results.of(arguments.subject)
    if arguments.again != "all":
        again = ("failed",) if arguments.again == "failed" else ()
        chosen = [test for test in chosen if test not in before or before[test]["outcome"] in again]
    return chosen


def run(
    files: list[str], folder: Path, arguments: argparse.Namespace, *, record: Path, wanted: list[str] | None
) -> None:
    """Let pytest run the tests of `wanted`, or list all of them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conformance.recorder", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(folder), "--timeout", str(arguments.limit + GRACE), "--tb=line"]
    command += ["--show-capture=no", "--no-summary", "-W", "ignore", "-p", "no:logging"]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(arguments.limit),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "CONFORMANCE_RECORD": str(record.absolute()),
        "CONFORMANCE_SUBJECT": arguments.subject,
        "CONFORMANCE_BACKEND": arguments.backend,
        "CONFORMANCE_WORLD": str(arguments.world),
    }
    if wanted is None:
        command += ["--collect-only", "-qq"]
    else:
        chosen = {test.partition("::")[0] for test in wanted}
        files = [file for file in files if file in chosen]
        (folder / "wanted.json").write_text(json.dumps(wanted))
        environment["CONFORMANCE_TESTS"] = str(folder / "wanted.json")
    command += [str((folder / module_of(file)).with_suffix(".py")) for file in files]
    where = subprocess.DEVNULL if wanted is None else None
    ended = subprocess.run(command, env={**os.environ, **environment}, cwd=folder, stdout=where, check=False)
    if ended.returncode not in (0, 1, 5) and wanted is not None:
        print(f"pytest ended with {ended.returncode}: run again for the tests that are missing", file=sys.stderr)


if __name__ == "__main__":
    main()
