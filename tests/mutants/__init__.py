"""Faults made by hand in the code, one for each contract, and the tests that must notice them.

``python -m tests.mutants run`` puts one fault after the other into a copy of the checkout and runs
the tests named with it. A fault that no test notices shows that a contract is not protected; so a
change that cuts or moves tests has to leave all of them caught.
"""
