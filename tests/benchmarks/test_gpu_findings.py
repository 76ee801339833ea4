"""Findings of the GPU check: verdicts and how they are kept."""

import json

from benchmarks.gpu.check import Findings, Unavailable
from benchmarks.harness import Aim


class TestFindings:
    def findings(self, tmp_path, quick=False):
        return Findings(tmp_path / "found.json", tmp_path, quick=quick, seconds=60)

    def verdict(self, tmp_path):
        return json.loads((tmp_path / "found.json").read_text())["verdict"]

    def test_a_missed_aim_fails_at_full_size_only(self, tmp_path):
        for quick, expected in (
            (False, "failed: MISSED share: 0.960 (aim: at least 0.97)"),
            (True, "passed"),
        ):
            found = self.findings(tmp_path, quick)
            found.aim(Aim("share", 0.96, 0.97, "", at_least=True))
            found.conclude()
            assert self.verdict(tmp_path) == expected

    def test_nothing_but_skipped_sections_is_skipped(self, tmp_path):
        found = self.findings(tmp_path)
        with found.section("a"):
            raise Unavailable("none here")
        found.conclude()
        assert self.verdict(tmp_path) == "skipped: none here"

    def test_what_was_left_out_is_named(self, tmp_path):
        found = self.findings(tmp_path)
        found.too_late("the last row")
        found.conclude()
        assert self.verdict(tmp_path) == "ran out of time: not measured: the last row"
