"""The pure parts of tools/bench/peers: statistics, the table, what is merged into it, what UCX's log says."""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench" / "peers"))
import report  # noqa: E402
import truth  # noqa: E402


def rounds(*speeds):
    return [{"gb_s": speed, "ratio": speed / 10, "cpu_s_per_gb": 1.0, "seconds": 0.001, "verified": True} for speed in speeds]


class Statistics(unittest.TestCase):
    def test_the_first_round_is_not_counted(self):
        made = report.cell("pages", "a", rounds(99, 1, 3, 2))
        self.assertEqual(made["rounds"], 3)
        self.assertEqual(made["gb_s"], {"median": 2, "min": 1, "max": 3})

    def test_a_single_round_is_all_there_is(self):
        self.assertEqual(report.cell("pages", "a", rounds(5))["gb_s"]["median"], 5)

    def test_values_that_are_missing_are_left_out(self):
        self.assertEqual(report.spread([None, 2, 4]), {"median": 3, "min": 2, "max": 4})
        self.assertIsNone(report.spread([None]))

    def test_one_transfer_that_was_not_verified_marks_the_cell(self):
        bad = rounds(1, 2)
        bad[0]["verified"] = False
        self.assertFalse(report.cell("pages", "a", bad)["verified"])


class Table(unittest.TestCase):
    def test_what_cannot_run_says_why_in_one_line(self):
        text = report.table([report.cell("pages", "a", [], "it\nbroke")])
        self.assertIn("not run: it broke", text)
        self.assertEqual(len(text.splitlines()), 3)

    def test_rounds_that_were_cut_short_are_shown_with_the_reason(self):
        self.assertIn("incomplete: not done after 5 s", report.row(report.cell("pages", "a", rounds(1), "not done after 5 s"))[-1])

    def test_only_one_page_has_a_latency(self):
        self.assertEqual(report.row(report.cell("one-page", "a", rounds(1, 1)))[5], "1.000")
        self.assertEqual(report.row(report.cell("pages", "a", rounds(1, 1)))[5], "-")

    def test_a_range_is_printed_where_there_is_one(self):
        self.assertEqual(report.row(report.cell("pages", "a", rounds(9, 1, 2, 3)))[2], "2.000 (1.000-3.000)")

    def test_the_same_work_stands_together(self):
        cells = [report.cell(work, peer, rounds(1)) for work, peer in (("pages", "a"), ("rows", "a"), ("pages", "b"))]
        self.assertEqual([line.split()[0] for line in report.table(cells).splitlines()[2:]], ["pages", "pages", "rows"])


class Kvferry(unittest.TestCase):
    def test_a_list_of_cells_is_found_wherever_it_stands(self):
        record = {"fabric": "tcp", "layout": "dcp1-4", "model": "deepseek-v3", "tokens": 8192, "rooms": 1, "gb_s": 2.5,
                  "ratio": {"median": 0.5, "min": 0.4, "max": 0.6}, "cpu_s_per_gb": 0.7}
        for document in ([record], {"cells": [record]}, {"machine": {}, "names": ["x"], "table": [record]}):
            made, = report.kvferry_cells(document)
            self.assertEqual((made["work"], made["peer"]), ("rows", "kvferry tcp"))
            self.assertEqual(made["gb_s"]["median"], 2.5)
            self.assertEqual(made["ratio"], {"median": 0.5, "min": 0.4, "max": 0.6})
            self.assertIn("tokens 8192", report.row(made)[-1])

    def test_the_fabrics_of_a_cell_are_rows_of_their_own(self):
        fabrics = [{"fabric": name, "rate": {"median": rate, "min": rate, "max": rate}, "to_memcpy": {"median": 0.5},
                    "cpu_s_per_gb": {"prefill": 0.1, "decode": 0.2}, "latency_s": {"p50": 0.004, "p99": 0.1}}
                   for name, rate in (("shm", 4e9), ("tcp", 2e9))]
        cell = {"model": "deepseek-v3", "layout": "same", "tokens": 64, "rooms": 1, "fabrics": fabrics}
        shm, tcp = report.kvferry_cells({"schema": 1, "cells": [cell]})
        self.assertEqual((shm["peer"], tcp["peer"], shm["work"]), ("kvferry shm", "kvferry tcp", "one-page"))
        self.assertEqual(report.row(shm)[2:6], ("4.000", "0.500", "0.30", "4.000"))

    def test_a_page_of_other_layers_is_not_called_the_same_work(self):
        cells = [{"fabric": "shm", "layout": "same", "tokens": 64, "rooms": 1, "layers": 8, "gb_s": 1}]
        self.assertEqual(report.kvferry_cells(cells)[0]["work"], "one-page of other layers")
        self.assertEqual(report.kvferry_cells(cells, 8)[0]["work"], "one-page")
        self.assertIn("layers 8", report.kvferry_cells(cells)[0]["note"])

    def test_other_models_are_other_work(self):
        made, = report.kvferry_cells([{"fabric": "shm", "layout": "same", "model": "llama-3.1-70b", "gb_s": 1}])
        self.assertEqual(made["work"], "same llama-3.1-70b")

    def test_rounds_become_a_spread(self):
        made, = report.kvferry_cells([{"fabric": "shm", "layout": "same", "goodput_gb_s": [3, 1, 2]}])
        self.assertEqual(made["gb_s"], {"median": 2, "min": 1, "max": 3})

    def test_unknown_fields_and_missing_ones_are_no_error(self):
        made, = report.kvferry_cells({"cells": [{"fabric": "ucx", "layout": {"prefill": "tp=1"}, "reason": "no device"}]})
        self.assertIn("not run: no device", report.table([made]))
        self.assertEqual(report.kvferry_cells({"nothing": 1}), [])


class Truth(unittest.TestCase):
    LOG = """[1.0] [vm:1:0]   | initiator self cfg#0                                     |
[1.0] [vm:1:0]   | remote memory write by ucp_put* from host memory to host |
[1.0] [vm:1:0]   | 0..inf | zero-copy   | wrong/one                         |
[1.0] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.0] [vm:1:0]   | initiator intra-node cfg#1                               |
[1.0] [vm:1:0]   | remote memory write by ucp_put* from host memory to host |
[1.0] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.0] [vm:1:0]   | Range  | Description |              Config               |
[1.0] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.0] [vm:1:0]   | 0..inf | zero-copy   | cma/memory                        |
[1.0] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.0] [vm:1:0]   | initiator intra-node cfg#1                               |
[1.0] [vm:1:0]   | active message by ucp_am_send* from host memory          |
[1.0] [vm:1:0]   | 0..92 | short              | sysv/memory    |
"""

    def test_the_put_of_the_connection_to_the_peer_counts(self):
        self.assertEqual(truth.puts(self.LOG), "0..inf zero-copy cma/memory")
        self.assertEqual(truth.puts("nothing of it"), "")


if __name__ == "__main__":
    unittest.main()
