"""A hunt for wrong answers: random small programs, each compared with plain autograd.

`programs` writes a program from a seed, `truth` runs it sample by sample, `outcomes` runs it under packprop and
says whether the answer was right, refused, wrong or a crash. ``python -m tests.hunt --help`` says how to hunt.
"""
