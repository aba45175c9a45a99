"""`doctor`: what on this machine or in a configuration would stop a run or slow it, and what to do about each.

    libraries, hardware, disk, model   facts: frozen records, and the `look_at_...` functions that fill them
    machine.py                         gathers all facts, each within its time limit
    hardware_checks, run_checks        functions from these facts to one finding each
    launch/plan                        what a run needs: doctor compares it with what is free
    command.py                         the list of checks, and what is printed
    probe.py, probes.py                looks in a process of their own at what may crash or hang: torch, bitsandbytes,
                                       a user's reward function

Gathering judges nothing and checks gather nothing. So a test can pass the facts that make a check fail. A look that
exceeds its time limit becomes a finding, and doctor goes on.
"""
