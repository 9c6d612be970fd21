// Entry point of the page: chooses the source of answers and starts the shell.
import { HttpSource } from "viewer/source/http";
import { EmbeddedSource } from "viewer/source/embedded";
import { Shell } from "viewer/shell";

const embedded = document.getElementById("run-data");
const source = embedded ? new EmbeddedSource(JSON.parse(embedded.textContent)) : new HttpSource();
const shell = new Shell(document.getElementById("app"), source);
window.viewer = shell; // for tests and for exploration in the console
shell.start();
