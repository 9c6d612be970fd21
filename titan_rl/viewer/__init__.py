"""Web page that shows runs. It reads nothing but their folders, so that running and finished runs and evaluations look
the same."""
