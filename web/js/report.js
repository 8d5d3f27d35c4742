// Shows the report of a LeanDiT node inside the node, after it ran; after an error, the error.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";

const WIDGET = "leandit_report";
const HEIGHT = 260;

function reportWidget(node) {
  const existing = node.widgets?.find((widget) => widget.name === WIDGET);
  if (existing) return existing;
  const area = document.createElement("textarea");
  area.readOnly = true;
  area.className = "comfy-multiline-input";
  area.style.fontFamily = "monospace";
  area.style.whiteSpace = "pre-wrap";
  area.style.width = "100%";
  area.style.height = "100%";
  area.style.minHeight = `${HEIGHT}px`;
  area.setAttribute("aria-label", "LeanDiT report");
  // A type of our own: the frontend draws known types itself and would leave this element out.
  const widget = node.addDOMWidget(WIDGET, "leanditReport", area, {
    getValue: () => area.value,
    setValue: (value) => {
      area.value = value ?? "";
    },
    getMinHeight: () => HEIGHT,
    hideOnZoom: false,
    serialize: false,
  });
  // Not part of the workflow: saved graphs and API prompts hold inputs only.
  widget.serialize = false;
  return widget;
}

function showReport(node, text) {
  const isNew = !node.widgets?.some((widget) => widget.name === WIDGET);
  reportWidget(node).value = text;
  if (isNew) {
    const size = node.computeSize();
    node.setSize([Math.max(node.size[0], size[0]), Math.max(node.size[1], size[1])]);
  }
  node.setDirtyCanvas(true, true);
}

app.registerExtension({
  name: "LeanDiT.report",
  setup() {
    api.addEventListener("execution_error", ({ detail }) => {
      const node = app.graph.getNodeById(detail.node_id);
      if (node?.type?.startsWith("LeanDiT")) showReport(node, `failed: ${detail.exception_message}`);
    });
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith("LeanDiT")) return;
    const onExecuted = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      if (output?.leandit) showReport(this, output.text.join("\n"));
    };
  },
});
