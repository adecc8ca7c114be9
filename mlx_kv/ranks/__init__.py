"""One model on several machines: ranks that process the same tokens, of which rank 0, the leader, decides.

Start and end:

    environment.py   variables of launchers: which rank this is, and the address of rank 0
    link.py          authenticated connections to the leader, control messages over them, and how a group ends
    group.py         `join_ranks`: how ranks find each other; `RankGroup`, what generation loops send, and totals

Work:

    splitting.py     splits a model, and loads the part of a rank
    communicator.py  what budgets send to other ranks
    engine.py        one engine on all ranks, and the caches that they keep between requests
"""
