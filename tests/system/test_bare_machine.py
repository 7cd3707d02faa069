"""What a fresh machine has not got must not be needed."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_sweep_runs_where_git_is_not_installed(tmp_path):
    """The manifest's commit is for people; without git, in a clone or not, it is unknown."""
    grid = tmp_path / "tiny.toml"
    grid.write_text(
        'title = "tiny"\nrates_per_s = [4]\nduration_s = 2\n\n'
        '[[arm]]\ntopologies = ["1R"]\npolicies = ["roles"]\n\n'
        '[[workload]]\nname = "short"\nturns = [[64, 8], [16, 8]]\n'
    )
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "ppdbench", "sweep", "--grid", str(grid), "-o", str(run)],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip

    assert done.returncode in (0, 1), done.stderr
    assert json.loads((run / "manifest.json").read_text())["commit"] is None
