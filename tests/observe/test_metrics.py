"""The log of rows: torn lines, and steps that stand exactly once after a resume."""

import pytest

from tlt_jax.observe import MetricsLog, read_rows


def test_rows_are_on_disk_as_they_are_appended(tmp_path):
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.append({"step": 1, "train/loss": 2.5})
    log.append({"step": 2, "train/loss": float("nan")})
    assert read_rows(log.path) == [{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": None}]
    log.close()
    log.close()


def test_no_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("torn", ['{"step": 3, "tra', '{"step": 3, "tra\n', "\x00\x00\x00", '{"st', "3"])
def test_torn_last_line_is_skipped_and_cut_before_the_next_row(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    with MetricsLog(path) as log:
        log.append({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_whole_last_row_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    with MetricsLog(path) as log:
        log.append({"step": 3})
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_damage_inside_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_rows(path)


def test_every_step_stands_once_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(1, 8):
            log.append({"step": step, "try": 1})
    with open(path, "a") as file:
        file.write('{"step": 8, "tr')
    with MetricsLog(path) as log:
        assert log.truncate_after(5) == 2
        for step in range(6, 10):
            log.append({"step": step, "try": 2})
    rows = read_rows(path)
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert [row["try"] for row in rows] == [1] * 5 + [2] * 4


def test_several_rows_a_step(tmp_path):
    with MetricsLog(tmp_path / "samples.jsonl") as log:
        for step in (0, 0, 10, 10, 20):
            log.append({"step": step})
        assert log.truncate_after(10) == 1
    assert [row["step"] for row in read_rows(tmp_path / "samples.jsonl")] == [0, 0, 10, 10]


@pytest.mark.parametrize("row", [{}, {"step": None}, {"step": 1.0}, {"step": True}])
def test_a_row_needs_a_step(tmp_path, row):
    with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(ValueError, match="step"):
        log.append(row)


def test_steps_that_are_missing_or_stand_twice_are_told(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for step in (1, 2, 4, 4, 5):
            log.append({"step": step})
        assert log.faults(7) == "3 steps are missing (the first: 3), 1 steps stand more than once (the first: 4)"
    with MetricsLog(tmp_path / "whole.jsonl") as log:
        log.append({"step": 1})
        assert log.faults(1) is None
