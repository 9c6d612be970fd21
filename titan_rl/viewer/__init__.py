"""The page on which runs are looked at: what is read of their folders, how it is served and drawn. The folders are all
that is read, so that runs that go on, ended ones and evaluations look the same."""
