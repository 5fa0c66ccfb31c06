"""How well the matrices of any checkpoint are conditioned: `python -m pc.report MODEL [OTHER...]`.

    read        a folder or file as a module without values, and its tensors one at a time
    draw        histograms of singular values
    words       what is said of a measurement: tables, advice, costs
    terminal    the tables, and the progress, in a terminal
    page        the same as one file of HTML
    html        what the pages of this project share

What they need beside torch is in the extra `report`. The measuring is `pc.measure`.
"""
