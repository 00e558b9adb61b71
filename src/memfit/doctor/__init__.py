"""What a recorded memory history of a GPU says: who holds the peak, what is never freed, what another setting reserves.

plain_pickle  pickles of plain containers, and nothing else
snapshot      what `torch.cuda.memory._dump_snapshot` writes
compact       the same as columns, in JSON
read          a file of either kind
stacks        which line of code a stack belongs to
ledger        who holds what, event by event
diagnosis     the findings
oom_text      the message of an out-of-memory error, explained
"""
