"""What the documentation says is run or compared: examples, tables, commands, paths, figures, the plan of removal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import mcore_patches
from mcore_patches import cli
from mcore_patches.overlay import preflight, settings
from mcore_patches.overlay.fingerprint import combined
from mcore_patches.overlay.patch import ERRORS, State
from mcore_patches.overlay.registry import Registry
from tests import readme_tables, releases

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PLAN = (ROOT / "mcore_patches" / "patches" / "README.md").read_text()
BUILT_IN = {e.id: e.patch for e in Registry.discover("mcore_patches.patches").entries.values() if e.builtin and e.patch}


def sections(text: str, level: int) -> dict[str, str]:
    """Title -> text up to the next heading of the same or a higher level; headings in code fences are none."""
    found: dict[str, str] = {}
    title, fenced = None, False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        heading = None if fenced else re.fullmatch(r"(#+) (.+)", line)
        if heading and len(heading[1]) <= level:
            title = heading[2] if len(heading[1]) == level else None
            if title is not None:
                assert title not in found, f"two sections {title!r}"
                found[title] = ""
        elif title is not None:
            found[title] += line + "\n"
    return found


def table(text: str) -> list[list[str]]:
    """Cells of the first table in a section, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def block(first_line: str, language: str = "python") -> str:
    """The code block that begins with a comment; the comment names the file."""
    (found,) = [b for b in blocks(language) if b.startswith(f"# {first_line}\n")]
    return found


def commands() -> list[str]:
    """Every line of the indented blocks, and every piece of inline code."""
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
    inline = [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose)]
    return inline + [line.strip() for line in prose.splitlines() if line.startswith("    ")]


def run(code: str, *path: Path, cwd: Path | None = None, **switches: str) -> str:
    """Standard output of code in an interpreter of its own, with no switches but the given ones."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MCORE_PATCHES", "PYTHON"))}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])), "OMP_NUM_THREADS": "1", **switches}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Tables ---------------------------------------------------------------------------------------------------------------


def test_releases_table_is_what_status_says():
    assert readme_tables.find(README, "releases")["table"].strip() == readme_tables.releases_table()


def test_releases_table_has_every_patch_and_release():
    shown = readme_tables.find(README, "releases")["table"]
    assert {row[0].strip("`") for row in table(shown)} == set(BUILT_IN)
    assert shown.splitlines()[0].endswith(f"| {' | '.join(releases.RELEASES)} |")


def test_figures_are_those_of_results_csv():
    place = readme_tables.find(README, "figures")
    benches = place["arguments"].split()
    for bench in benches:
        assert (ROOT / "gpu_ci" / "bench" / f"{bench}.py").exists(), f"no bench {bench}"
    assert place["table"].strip() == readme_tables.figures_table(benches), "run python -m tests.readme_tables"


@pytest.mark.parametrize("name", ["qsa-ratios", "mla-ratios"])
def test_ratios_are_those_of_results_csv(name):
    place = readme_tables.find(README, name)
    table = readme_tables.ratios_table(place["arguments"].split())
    assert place["table"].strip() == table, "run python -m tests.readme_tables"
    assert table != readme_tables.NO_FIGURES


def test_figures_table_quotes_rows(tmp_path):
    csv = tmp_path / "results.csv"
    csv.write_text(
        "date,bench,case,metric,value,unit,device,torch,tilelang,megatron_core,command\n"
        "2026-09-01,mine,T1-H2,forward,1.5,ms,H200,2.13,0.1.15,0.19.2,python -m gpu_ci.bench.mine\n"
        "2026-09-01,other,T1-H2,forward,2.5,ms,H200,2.13,0.1.15,0.19.2,python -m gpu_ci.bench.other\n"
    )
    (row,) = table(readme_tables.figures_table(["mine"], csv))
    assert row[:4] == ["mine", "T1-H2", "forward", "1.5 ms"]
    assert row[4:6] == ["H200, torch 2.13, tilelang 0.1.15, megatron-core 0.19.2", "2026-09-01"]
    assert row[6:] == ["`python -m gpu_ci.bench.mine`"]
    assert readme_tables.figures_table(["none"], csv) == readme_tables.NO_FIGURES


def test_no_measured_figure_stands_outside_the_table():
    prose = README.replace(readme_tables.find(README, "figures")["table"], "")
    figures = re.findall(
        r"\d[\d.,]*\s?(?:ms|us|µs|[KMGT]i?B|[TGM]FLOPS?|tokens/s|%|x faster|times faster)(?!\w)", prose
    )
    scores = 4 * 32 * 32768**2  # fp32 scores of 32 heads, 32768 queries and as many keys
    sample = 4 * 24 * 64 * 64  # those of the declined call in the sample report
    assert sorted(figures) == sorted([f"{scores >> 30} GiB", f"{sample / 2**10:.1f} KiB"])


def test_states_table():
    rows = table(sections(README, 2)["States"])
    assert {State(row[0].split()[0]) for row in rows} == set(State)
    assert {State(row[0].split()[0]) for row in rows if row[0].endswith(" *")} == ERRORS
    assert all(len(row) == 3 and all(row) for row in rows)


def test_switches_table():
    rows = table(sections(README, 2)["Switches"])
    assert {row[0].strip("`") for row in rows} == settings.KNOWN


def test_bad_packages_are_named():
    text = sections(README, 2)["Troubleshooting"]
    for name, bad in preflight.KNOWN_BAD.items():
        for release in bad:
            assert f"{name} {release}" in text


# Commands, paths and links --------------------------------------------------------------------------------------------


def own_commands() -> list[str]:
    found = [c.partition("#")[0].strip() for c in commands() if c.startswith("mcore-patches ")]
    assert len(found) >= 8
    return sorted(set(found))


@pytest.mark.parametrize("command", own_commands())
def test_own_command_parses(command):
    assert cli._parser().parse_args(command.split()[1:]).run


def test_every_subcommand_is_shown():
    (subcommands,) = [a.choices for a in cli._parser()._actions if a.dest != "help" and isinstance(a.choices, dict)]
    assert {c.split()[1] for c in own_commands()} >= set(subcommands)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    found = {c.split()[1] for c in commands() if re.match(r"make [a-z]", c)}
    assert {"demo", "test", "check"} <= found
    for target in found:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for variable in {m for c in commands() for m in re.findall(r"\b([A-Z]+)=", c) if "make" in c}:
        assert f"$({variable})" in makefile, variable


def test_modules_run_with_m_exist():
    found = {m for c in commands() for m in re.findall(r"\bpython -m ([\w.]+)", c)}
    assert found
    for module in found:
        assert find_spec(module) is not None, module


def test_paths_exist():
    ours = r"(?:mcore_patches|tests|gpu_ci|requirements)/[\w./-]*"
    found = {p for c in commands() for p in re.findall(rf"^{ours}", c)}
    assert len(found) >= 15
    found.discard("gpu_ci/bench/results.csv")  # the benches write it
    assert not [p for p in found if "ID" not in p and not (ROOT / p).exists()]


@pytest.mark.parametrize("text", [README, PLAN], ids=["README", "patches-README"])
def test_links_lead_somewhere(text):
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    base = ROOT if text is README else ROOT / "mcore_patches" / "patches"
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif not target.startswith("https://"):
            assert (base / target).exists(), target


# Examples -------------------------------------------------------------------------------------------------------------

AFTER_THE_REPORT = """
import json
from importlib import import_module
def of_seven_and_two():
    try:
        return import_module("megatron.core.utils").divide(7, 2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
row = mcore_patches.status()["checked_division"]
said = {"listed": [row.state, row.reason], "plain": of_seven_and_two()}
said["applied"] = mcore_patches.apply_patches("checked_division")["checked_division"].state
said["patched"] = of_seven_and_two()
said["name"] = import_module("megatron.core.utils").ensure_divisibility.__module__
mcore_patches.revert("checked_division")
said["reverted"] = of_seven_and_two()
import os
os.environ["MCORE_PATCHES"] = "all,checked_division"
said["decisions"] = [r.decision or r.state for r in mcore_patches.apply_patches(dry_run=True)]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """Output of the report's example, then what became of the third-party patch, on the installed megatron-core."""
    folder = tmp_path_factory.mktemp("acme")
    (folder / "acme_patches.py").write_text(block("acme_patches.py"))
    # What pip writes for the entry point.
    (group, line) = block("pyproject.toml of that package", "toml").splitlines()[1:]
    group = re.fullmatch(r'\[project\.entry-points\."(.+)"\]', group)[1]
    name, value = re.fullmatch(r'(\w+) = "(.+)"', line).groups()
    info = folder / "acme_patches-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-patches\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    printed = run(block("report.py") + AFTER_THE_REPORT, folder)
    report, said = printed.strip().rsplit("\n", 1)
    return report, json.loads(said)


def as_shown(report: str) -> str:
    """A report without what differs between machines: folders, a git hash, Python's release, line breaks."""
    report = re.sub(r" \(package_info appends .*?\)", "", report)
    report = re.sub(r"Python (\d+)\.\d+(\.\d+)?", r"Python \1", report)
    report = re.sub(r"\S*/(?=megatron/core/|mcore_patches/patches/)", ".../", report)
    report = re.sub(r"(mcore_patches/patches/\w+\.py):\d+", r"\1", report)
    return re.sub(r"\s+", " ", report).strip()


def test_report_is_as_shown(examples):
    (shown,) = blocks("text")
    head, row = shown.split("\n", 1)
    printed = as_shown(examples[0])
    assert printed.startswith(as_shown(head))
    assert as_shown(row) in printed


def test_worked_example(examples):
    said = examples[1]
    assert said["listed"][0] == "DISABLED"
    assert "acme-patches 1.0" in said["listed"][1] and "only when they are named" in said["listed"][1]
    assert said["plain"] == said["reverted"] == "AssertionError: 7 is not divisible by 2"
    assert (said["applied"], said["patched"]) == ("APPLIED", "ValueError: 7 is not divisible by 2")
    assert said["name"] == "megatron.core.utils"
    assert len(said["decisions"]) == len(BUILT_IN) + 1
    assert set(said["decisions"]) <= {"APPLIED", "ALREADY_APPLIED", "PENDING", "UPSTREAM_FIXED"}


def test_worked_example_knows_every_release():
    (known,) = re.findall(r'"([0-9a-f]{64})": "needs"', block("acme_patches.py"))
    assert "# 0.16.1 to 0.19.2" in block("acme_patches.py")
    for release in releases.RELEASES:
        text = (releases.path(release) / "megatron" / "core" / "utils.py").read_text()
        assert combined(text, ("ensure_divisibility",)) == known, release


def test_three_lines():
    printed = run(block("in every worker process, before the model is built"))
    assert printed.startswith("mcore_patches ") and re.search(r"^sparse_mla_nope +PENDING", printed, re.MULTILINE)


def test_an_op_by_itself():
    printed = run(block("attend.py: sparse MLA without megatron, on a GPU or a CPU"), CUDA_VISIBLE_DEVICES="")
    assert printed.startswith("chunked (q is on cpu, ")
    assert printed.endswith("): out (1, 300, 24, 512), gradients of kv (1, 300, 1, 512)\n")


def test_hooks_module(tmp_path):
    (tmp_path / "my_hooks.py").write_text(block("my_hooks.py"))
    printed = run("import my_hooks; my_hooks.init(None)", tmp_path)
    assert re.search(r"^sparse_mla_nope +PENDING", printed, re.MULTILINE)


def test_launcher(tmp_path):
    script = "import mcore_patches, sys; print(__name__, mcore_patches.status()['sparse_mla_nope'].state, sys.argv[1:])"
    (tmp_path / "pretrain_gpt.py").write_text(script)
    (tmp_path / "pretrain_patched.py").write_text(block("pretrain_patched.py"))
    code = "import runpy, sys; sys.argv = ['pretrain_patched.py', '--x']; runpy.run_path('pretrain_patched.py')"
    assert run(code, cwd=tmp_path).splitlines()[-1] == "__main__ PENDING ['--x']"


def test_start_up_file(tmp_path):
    (command,) = re.findall(r"^    (echo 'import mcore_patches.*?\.pth\")$", README, re.DOTALL | re.MULTILINE)
    venv.create(tmp_path, symlinks=True)
    libraries = os.pathsep.join([str(ROOT), *(p for p in sys.path if p.endswith("-packages"))])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MCORE_PATCHES", "PYTHON"))}
    environment |= {"PYTHONPATH": libraries, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    code = "import sys; print('mcore_patches' in sys.modules and sys.modules['mcore_patches'].status()['qsa'].state)"

    def state() -> str:
        done = subprocess.run(
            [tmp_path / "bin" / "python", "-c", code], env=environment, capture_output=True, text=True
        )
        # Patches for older releases say that they have nothing to do here.
        said = [line for line in done.stderr.splitlines() if ": UPSTREAM_FIXED: " not in line]
        assert (done.returncode, said) == (0, [])
        return done.stdout.strip()

    assert state() == "False"
    subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=60)
    assert state() == "PENDING"


# The plan of removal --------------------------------------------------------------------------------------------------

PARTS = ["Upstream", "Landed", "Delete", "Verify"]


def test_every_patch_has_a_section_and_only_those():
    assert set(sections(PLAN, 2)) == set(BUILT_IN)


@pytest.mark.parametrize("patch_id", sorted(BUILT_IN))
def test_section_of_the_plan(patch_id):
    section = sections(PLAN, 2)[patch_id]
    parts = sections(section, 3)
    assert list(parts) == PARTS
    assert all(text.strip() for text in parts.values())
    assert BUILT_IN[patch_id].upstream in parts["Upstream"]
    assert "UPSTREAM_FIXED" in parts["Landed"]
    named = paths_of(section)
    assert f"mcore_patches/patches/{patch_id}.py" in paths_of(parts["Delete"])
    assert not [p for p in named if not (ROOT / p).exists()]


def paths_of(text: str) -> set[str]:
    return set(re.findall(r"`((?:mcore_patches|tests|gpu_ci)/[\w./-]+)`", text))


@pytest.mark.parametrize("patch_id", sorted(BUILT_IN))
def test_files_named_after_a_patch_are_deleted_with_it(patch_id):
    delete = sections(sections(PLAN, 2)[patch_id], 3)["Delete"]
    (pattern,) = re.findall(r"`git ls-files '\*(\w+)\*'`", delete)
    assert pattern == patch_id
    folders = [p for p in paths_of(delete) if p.endswith("/")]
    listed = [p for p in files() if patch_id in p or p.startswith(tuple(folders))]
    assert f"mcore_patches/patches/{patch_id}.py" in listed
    others = [f"mcore_patches/patches/{other}.py" for other in BUILT_IN if other != patch_id]
    assert not set(listed) & set(others), "deleting one patch must leave the others"


def files() -> Iterator[str]:
    for folder in ("mcore_patches", "tests", "gpu_ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT).as_posix()


def test_changelog_names_the_version_and_every_patch():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", text, re.MULTILINE)[1] == mcore_patches.__version__
    assert not [i for i in BUILT_IN if f"`{i}`" not in text]
