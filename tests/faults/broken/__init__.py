"""Workers with one law broken each, so that the checker can be seen to notice (test_checker.py).

Each module replaces one function of the package and then runs the same `main`. The package has no switch for that.
"""
