"""Web page that shows runs. It reads only their folders, so running and finished runs and evaluations look the same."""
