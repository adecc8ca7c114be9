"""One model on several machines: ranks that read the same tokens, of which one decides.

environment.py  what a launcher says: which rank this is, and where the first one is
channel.py      connections between ranks: who is let in, and when one counts as broken
link.py         what the leader tells, what the others answer, and the news that somebody is gone
group.py        joining: all ranks of one run, started alike
watchdog.py     steps that never end
splitting.py    what can be split, and the part of each rank
peers.py        what the parts tell each other before they evict
collectives.py  numbers of all ranks, on the stream of the model
"""
