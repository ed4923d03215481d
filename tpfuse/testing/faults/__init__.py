"""Measure which faults the tests catch: plant faults in the library, one at a time, and run both tiers against each.

    python -m tpfuse.testing.faults record FOLDER    run every test once (or those that pytest's arguments after FOLDER
                                                     choose) and record which functions each one reaches
    python -m tpfuse.testing.faults run FOLDER       plant faults and run the tests that reach them, first tier first
    python -m tpfuse.testing.faults report FOLDER    print what each tier caught, by area, and the faults that survived

Run it in the root of a checkout. FOLDER keeps the record and all results: `run` continues where it was ended. `record`
needs Python 3.12, whose `sys.monitoring` makes it cheap. A fault is a change of the syntax tree of one function
(`plant.py` lists the kinds); a seed chooses the faults. The checkout itself is never changed, since each worker has a
copy.

mutmut and cosmic-ray plant faults too, but they do not know tiers, or tests whose ranks are other processes, and mutmut
calls each function through a dispatcher, which is not possible for Triton's kernels.
"""
