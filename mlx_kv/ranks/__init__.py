"""One model on several machines: ranks that read the same tokens, of which one decides.

How they come together, and end:

    environment.py  what a launcher says: which rank this is, and where the first one is
    joining.py      how ranks find each other
    channel.py      connections between ranks: who is let in, and when one counts as broken
    link.py         what the leader tells, what the others answer, and the news that somebody is gone
    group.py        all ranks of one run, started alike
    watchdog.py     ends ranks that hang, and signals to followers

What they do together:

    splitting.py    models in parts, and the part of each rank
    communicator.py what loops and budgets send to other ranks
    engine.py       the leader's engine (numbered.py: caches of which every rank has its part)
    following.py    what the others do
    totals.py       what all of them hold
    collectives.py  what goes by MLX's own collectives beside the model
"""
