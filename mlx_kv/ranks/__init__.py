"""One model on several machines: ranks that process the same tokens, of which rank 0, the leader, decides.

Start and end:

    environment.py   variables of launchers: which rank this is, and the address of rank 0
    joining.py       how ranks find each other
    channel.py       authenticated TCP connections between the leader and the other ranks
    link.py          control messages over these connections, and how a group ends
    group.py         `RankGroup`, `join_ranks`, and totals of all ranks
    watchdog.py      ends ranks that hang; signals to followers

Work:

    splitting.py     splits a model, and loads the part of a rank
    communicator.py  what generation loops and budgets send to other ranks
    engine.py        one engine on all ranks, and caches with numbers
"""
