"""What the README shows runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs(tmp_path, compilation_cache):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code.splitlines()) <= 30
    folders = {"run.output_dir": "runs", "data.cache_dir": "data"}
    local = ", ".join(f'"{key}={tmp_path / name}"' for key, name in folders.items())
    local += f', "device.compilation_cache={compilation_cache}"'
    code = code.replace('["run.name=from_python"]', f'["run.name=from_python", {local}]')
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "bits per byte" in done.stdout
    assert "target calls per token" in done.stdout


def test_the_two_lines_of_set_up_stand_there():
    assert "python -m pip install -e . && python -m tlt_jax.main --config configs/quickstart.yaml" in README
    assert "python -m pip install -e '.[test]' && python -m pytest" in README


def test_every_file_that_the_readme_links_is_there():
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
