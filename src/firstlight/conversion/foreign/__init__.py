"""Read checkpoints from other programs. There is one module for each program. The modules `layout`
and `model` contain the code that all of them share.
"""
