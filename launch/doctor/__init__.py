"""`doctor`: what about this machine and a configuration would stop or slow a run, with the remedy for each.

    facts/    what is: frozen records, each gathered at the edge by the `look_at_...` function beside it
    checks/   what that means: small functions from facts to one finding each
    probes.py programs of their own for what may crash or hang: torch, bitsandbytes, a user's reward function

Nothing is judged while gathering and nothing is gathered while judging, so a test hands in the facts that make a check
fail. Every look has a time limit; one that exceeds it is a finding, and doctor goes on.
"""
