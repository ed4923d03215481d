"""Measures what the tests catch: plants faults in the library, one at a time, and runs both tiers against each.

    python -m tpfuse.testing.faults record FOLDER    run every test once (or those that pytest's arguments after FOLDER
                                                     choose) and record which functions each one reaches
    python -m tpfuse.testing.faults run FOLDER       plant faults and run the tests that reach them, first tier first
    python -m tpfuse.testing.faults report FOLDER    print what each tier caught, by area, and the faults that survived

Run it in the root of a checkout. FOLDER keeps everything: `run` goes on where it was ended. `record` needs Python 3.12,
whose `sys.monitoring` makes it cheap. A fault is a change of the syntax tree of one function (`plant.py` lists the
kinds), chosen by a seed; the checkout itself is never changed, since each worker has a copy.

mutmut and cosmic-ray plant faults too, but know neither tiers nor tests whose ranks are other processes, and mutmut
calls each function through a dispatcher, which Triton's kernels cannot do.
"""
