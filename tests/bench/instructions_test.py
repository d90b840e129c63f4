"""The verdict of instructions.py: a gate that cannot fail proves nothing."""
import unittest

import instructions


def measured(count, checksum="a"):
    return {"instructions": count, "checksum": checksum}


class Verdict(unittest.TestCase):
    def fine(self, was, now):
        return instructions.verdict("path", was, now)[1]

    def test_up_to_five_percent_is_fine_both_ways(self):
        self.assertTrue(self.fine(measured(1000), measured(1050)))
        self.assertTrue(self.fine(measured(1000), measured(950)))

    def test_more_fails_both_ways(self):
        self.assertFalse(self.fine(measured(1000), measured(1051)))
        self.assertFalse(self.fine(measured(1000), measured(949)))

    def test_other_work_fails_whatever_it_costs(self):
        self.assertFalse(self.fine(measured(1000), measured(1000, "b")))

    def test_a_path_that_is_not_recorded_fails(self):
        self.assertFalse(self.fine(None, measured(1000)))


if __name__ == "__main__":
    unittest.main()
