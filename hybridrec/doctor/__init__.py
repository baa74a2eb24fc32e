"""``python -m hybridrec.doctor``: what of this machine and of its installation training can use, and what to do.

It starts without torch. Everything that could crash or hang (imports, kernels, collectives) runs in processes of its
own, each with a time limit, so that the report always comes.

Machine:
    machine, network   what the operating system says: standard library alone
    versions           which distributions are installed, and which stack they make
Processes of their own:
    stack              torch, TorchRec, FBGEMM, the core, backends, kernels; patches and operators
    collectives        one rank of a self-test of collectives
"""
